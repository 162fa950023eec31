"""One call to the ranks for many cases, in one process group: making a group costs more than most cases. See tests/ranks.py."""

import importlib
import os
import time
from collections.abc import Iterable
from typing import Any

from tests.ranks import Ranks


def run_each(ranks: Ranks, function: str, cases: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """For every case what `function` ("module:name") returns on every rank, in rank order."""
    answers = ranks.run("tests.core.ranks_torch_each:each", named=function, cases=list(cases))
    return [list(of_case) for of_case in zip(*answers, strict=True)]


def each(rank: int, world: int, named: str, cases: list[dict[str, Any]]) -> list[Any]:
    """What a rank returns for the cases, one after the other; an error names its case."""
    module, name = named.split(":")
    call = getattr(importlib.import_module(module), name)
    found = []
    for case in cases:
        try:
            found.append(call(rank=rank, world=world, **case))
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise
    return found


# What goes wrong on ranks, for the tests of tests/ranks.py.


def fail(where: int | None, rank: int, world: int) -> int:
    if rank == where:
        raise ValueError("only here")
    return rank


def hang(rank: int, world: int) -> None:
    time.sleep(1000)


def leave(rank: int, world: int) -> None:
    os._exit(3)

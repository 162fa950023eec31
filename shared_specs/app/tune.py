"""The framework-free body of `tune`: candidates of a kernel's block sizes, timed in turn, and the entries they become."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shared_specs.app.bench import Clock, interleave
from shared_specs.blocks import CANDIDATES, Blocks, Kernels


def best_blocks(
    kernels: Kernels, op: str, with_blocks: Callable[[Blocks], Callable[[], Any]], clock: Clock, repeats: int
) -> Blocks:
    """The fastest candidate of those that compile; `with_blocks` returns what launches with these blocks."""
    runs: dict[str, Callable[[], Any]] = {}
    found: dict[str, Blocks] = {}
    for candidate in CANDIDATES[kernels][op]:
        name = ", ".join(f"{field} {value}" for field, value in asdict(candidate).items())
        run = with_blocks(candidate)
        try:
            run()
        except Exception as error:  # more shared memory than there is
            print(f"{op}: {name}: left out: {type(error).__name__}: {str(error)[:120]}")
            continue
        runs[name], found[name] = run, candidate
    if not runs:
        raise RuntimeError(f"tune: no candidate of {op} runs")
    chosen = fastest(runs, clock, repeats)
    print(f"{op}: {chosen}")
    return found[chosen]


def fastest(runs: Mapping[str, Callable[[], Any]], clock: Clock, repeats: int) -> str:
    """The name with the least median time."""
    seconds = interleave(runs, repeats, clock.seconds)
    return min(seconds, key=lambda name: statistics.median(seconds[name]))

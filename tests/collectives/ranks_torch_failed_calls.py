"""What the ranks run where one of them does not make the call that the others make. See tests/ranks.py.

As a script, `python -m tests.collectives.ranks_torch_failed_calls RANK PORT`: three processes of which two end.
"""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.mlp.ranks_torch_tensor_mlp import call, operands, part_of
from tiled_torch import parallel
from tiled_torch.collectives import consistency, failures

SECONDS = 1.0  # what a rank waits in a group before its call fails


def impatient(ranks: list[int]) -> Any:
    """A group that was connected at leisure, and whose calls fail after SECONDS."""
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        # torch 2.14 has it under a public name.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=SECONDS), group)
    return group


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def log() -> list[str]:
    """What the ranks wrote so far."""
    store = dist.distributed_c10d._get_default_store()
    return store.get(failures._KEY).decode().splitlines() if store.check([failures._KEY]) else []


def scatter(group: Any, rows: int) -> Any:
    return parallel.reduce_scatter_to_sequence_parallel_region(torch.ones(rows, 2), group=group)


def gather(group: Any) -> Any:
    return parallel.gather_from_sequence_parallel_region(torch.ones(3), group=group)


def absent(rank: int, world: int, missing: int) -> dict[str, Any]:
    """One rank of all makes no call."""
    group = impatient(list(range(world)))
    scatter(group, world)  # withdraws what a call of a test before has written
    dist.barrier()
    before = len(log())
    dist.barrier()
    scatter(group, world)
    quiet = log()[before:]
    message = "no call" if rank == missing else message_of(lambda: scatter(group, world))
    dist.barrier()  # nobody goes on before all have been told
    written = len(log()) - before
    dist.barrier()
    scatter(None, world)  # a call that works: what this rank wrote no longer holds
    dist.barrier()
    return {"message": message, "quiet": quiet, "written": written, "last": log()[-world:]}


def subgroups(rank: int, world: int) -> str:
    """Rank 3 makes a wrong call; ranks 1 and 2 wait for it in two groups, and rank 0 for rank 2 in a third."""
    groups = [impatient(ranks) for ranks in ([0, 2], [1, 3], [2, 3])]
    dist.barrier()
    calls = [lambda: scatter(groups[0], 2), lambda: scatter(groups[1], 2), lambda: gather(groups[2])]
    message = message_of([*calls, lambda: scatter(groups[1], 3)][rank])
    dist.barrier()
    return message


def backend(name: str) -> Any:
    """As under this backend, whose calls are compared the first time only unless it is gloo."""
    return mock.patch.object(consistency, "backend_of", return_value=name)


def functions(rank: int, world: int, under: str) -> str:
    """Two calls that both ranks have made before: rank 0 makes the one, rank 1 the other."""
    group = impatient(list(range(world)))
    with backend(under):
        gather(group)
        scatter(group, world)
        message = message_of(lambda: gather(group) if rank else scatter(group, world))
    dist.barrier()
    return message


def known_calls(rank: int, world: int, under: str) -> list[str]:
    """Two calls of one function that both ranks have made before: one rank now makes the one, the other the other.

    Then both make the first one, the second rank in shards that nobody has made before.
    """
    group = impatient(list(range(world)))
    given = {n: part_of(n, a, rank, world) if n != "x" else a for n, a in operands(8, gated=True, bias=False).items()}
    with backend(under):
        for split in (True, False):
            call(given, sequence_parallel=split, group=group)
        messages = [message_of(lambda: call(given, sequence_parallel=not rank, group=group))]
        if under == "gloo":
            messages.append(message_of(lambda: call(given, sequence_parallel=True, num_shards=1 + rank, group=group)))
    dist.barrier()
    return messages


def main(rank: int, port: int) -> None:
    """Rank 1 ends by an error of its own, rank 2 is killed; rank 0 prints what it is told."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    gather(None)
    if rank == 1:
        raise KeyError("no such sample")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print(message_of(lambda: gather(None)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

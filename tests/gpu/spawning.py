"""Ranks of a group, each a process with a GPU of its own, that run one function and hand back what it found."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# (rank, world, device) -> name and answer of every check; the first that raises is answered by its text and is the last.
Answers = Callable[[int, int, torch.device], Iterator[tuple[str, Any]]]


def answers_of(answers: Answers, world: int, kind: str) -> list[dict[str, Any]]:
    """What every rank found, on devices of a kind."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_on_rank, (world, port, kind, answers, results), nprocs=world)
        return [results[rank] for rank in range(world)]


def _on_rank(rank: int, world: int, port: int, kind: str, answers: Answers, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Left to themselves both look the host's own name up, which a machine without a network may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", rank=rank, world_size=world)
    results[rank] = dict(answers(rank, world, device))
    dist.destroy_process_group()

"""The ranks of the GPU tests, started on a CPU: they meet on a machine that cannot look its own name up."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.spawning import answers_of

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

pytestmark = pytest.mark.ranks


def answers(rank: int, world: int, device: torch.device) -> Iterator[tuple[str, Any]]:
    yield "interfaces", [os.environ.get(name) for name in VARIABLES]
    total = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(total)
    yield "total", total.tolist()


@pytest.mark.deep
def test_ranks_of_the_gpu_tests_use_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert answers_of(answers, 2, "cpu") == [{"interfaces": ["lo", "lo"], "total": [3.0, 3.0]}] * 2

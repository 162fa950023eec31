"""The scripts of examples/ as the processes of a launch run them."""

import runpy
from pathlib import Path

import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context_torch.py"


def long_context(rank: int, world: int, model: str) -> list[float]:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    return runpy.run_path(str(SCRIPT))["main"](["--model", model, "--tokens", "64"])

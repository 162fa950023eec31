"""The processes that torchrun started, as one team; how the options lay the model out over them."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared_specs.app.finetune.processes import ALONE, Team, check_layout, end_alone, layout
from shared_specs.app.options import FinetuneOptions
from shared_specs.config import ParallelConfig

# gloo reports what happened to another process in a plain RuntimeError, as it does what a caller did wrong.
_GLOO_WORDS = (
    "gloo/transport",
    "connectfullmesh",
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
)


class TorchTeam:
    """See `shared_specs.app.finetune.processes.Team`. What is gathered travels over gloo, whatever collectives use."""

    some_lost = False

    def __init__(self, options: FinetuneOptions, device: torch.device) -> None:
        timeout = timedelta(seconds=options.group_timeout)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.control)
        return found

    def lost(self, error: BaseException) -> str | None:
        text = str(error)
        known = isinstance(error, RuntimeError) and any(word in text.lower() for word in _GLOO_WORDS)
        self.some_lost = known or isinstance(error, dist.DistError)
        return text if self.some_lost else None

    def leave(self) -> None:
        """Give the other processes up; at once, without them, where one is lost or this one fails by itself."""
        end_alone(self.some_lost)
        dist.destroy_process_group()


def join(options: FinetuneOptions, device: torch.device) -> Team:
    """Return the team of a run: the processes of torchrun, which have to be as many as the options ask for."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    advice = f"Start it with torchrun --nproc-per-node {options.ranks} -m tiled_torch finetune."
    if options.ranks == 1:
        advice = f"Pass for example --fsdp {count}."
    check_layout(options, count, "processes", advice)
    return ALONE if count == 1 else TorchTeam(options, device)


def mesh_and_config(options: FinetuneOptions, heads: int, device: torch.device) -> tuple[DeviceMesh, ParallelConfig]:
    """Return the processes as a mesh, and what `parallelize` does along each of its axes. heads: of the model's queries."""
    axes, config = layout(options, heads, compiled=False)
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)), config


def rows(options: FinetuneOptions, rank: int) -> slice:
    """Return this rank's sequences of the batch; the ranks that share a sequence or a layer come side by side and have the
    same.
    """
    size = options.batch // (options.dp * options.fsdp)
    part = rank // (options.cp * options.tp)
    return slice(part * size, (part + 1) * size)

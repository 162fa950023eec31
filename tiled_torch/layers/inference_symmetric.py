"""Reduce-scatter and all-gather through symmetric memory and multicast: the one file that touches those interfaces of torch.

Every rank's buffer is mapped by all of them (`torch.distributed._symmetric_memory`), so that a rank reads its rows of every
partial result and writes its normalised rows to all ranks at once (NVLink multicast), without a library call between.
Unmeasured: it needs several GPUs of the Hopper class in one NVLink domain, and no record of such a machine exists yet.
"""

import os
import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiled_torch.collectives.groups import RankGroup, backend_of
from tiled_torch.collectives.transport import wide_sum
from tiled_torch.core.tensors import dtype_name

_HOPPER = (9, 0)
_ALIGNMENT = 16  # bytes of one multicast store
_PATIENCE = 600_000  # milliseconds that ranks wait for each other, as an NCCL group does unless it is told otherwise
_OPERATOR = "multimem_all_gather_out"


class _Buffer(NamedTuple):
    """Memory of this rank, and the handle by which torch maps every rank's."""

    memory: Tensor
    handle: Any


# By group, not by its name, which a group made after this one was destroyed may have again.
_buffers: "weakref.WeakKeyDictionary[Any, dict[tuple[torch.dtype, torch.device, str], _Buffer]]" = (
    weakref.WeakKeyDictionary()
)


def why_not(over: RankGroup, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why symmetric memory cannot be used by this group here; None where it can. The same on every rank of like
    machines.
    """
    if not over.several:
        return "A group of one rank has nothing to exchange."
    if device.type != "cuda":
        return f"Symmetric memory is a path of CUDA devices, and the tensors are on {device.type}."
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"It adds bfloat16, float16 and float32, not {dtype_name(dtype)}."
    if not torch.cuda.is_available():
        return "Symmetric memory is a path of CUDA devices, and PyTorch finds none."
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return f"Multicast needs a GPU of the Hopper class or newer, and this is {torch.cuda.get_device_name(device)}."
    if (backend := backend_of(over, "cuda")) != "nccl":
        return f"The group's backend for CUDA tensors is {backend}; it has to be nccl."
    if over.size > torch.cuda.device_count():
        return f"The group has {over.size} ranks and this host {torch.cuda.device_count()} GPUs; they have to share NVLink."
    local = int(
        os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())
    )  # torchrun says how many ranks a host has
    ranks = torch.distributed.get_process_group_ranks(over.group or torch.distributed.group.WORLD)
    if len({rank // local for rank in ranks}) > 1:
        return f"The group's ranks, {', '.join(map(str, ranks))}, are on several hosts of {local} ranks."
    return _missing(device)


def _missing(device: torch.device) -> str | None:
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        return f"This build of torch has no symmetric memory ({error})."
    if not hasattr(torch.ops.symm_mem, _OPERATOR):
        return f"This version of torch has no {_OPERATOR}."
    index = device.index if device.index is not None else torch.cuda.current_device()
    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index):
        return "The GPUs have no NVLink multicast (NVSwitch)."
    return None


def partial_buffer(over: RankGroup, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [rows, features] of memory that every rank of the group can read, for this rank's partial result."""
    return _buffer(over, "partial", rows * features, dtype, device).memory[: rows * features].view(rows, features)


def reduce_scatter_rows(over: RankGroup, partial: Tensor) -> Tensor:
    """Return this rank's rows of the sum of all ranks' `partial`, which is a `partial_buffer`.

    In float32, in rank order and rounded once: what `transport.reduce_scatter` makes of them.
    """
    handle = _buffer(over, "partial", partial.numel(), partial.dtype, partial.device).handle
    rows = partial.shape[0] // over.size
    mine = slice(over.rank * rows, (over.rank + 1) * rows)
    handle.barrier(timeout_ms=_PATIENCE)  # every rank has written its partial result
    parts = [handle.get_buffer(rank, partial.shape, partial.dtype)[mine] for rank in range(over.size)]
    total = wide_sum(torch.stack(parts))
    handle.barrier(timeout_ms=_PATIENCE)  # and none writes its next one before all have read
    return total


def fits_multicast(rows: int, features: int, dtype: torch.dtype) -> bool:
    """Return whether a rank's rows are whole multicast stores."""
    return rows * features * dtype.itemsize % _ALIGNMENT == 0


def all_gather_rows(over: RankGroup, mine: Tensor) -> Tensor:
    """Return all ranks' rows, written to every rank by multicast; in memory of its own."""
    rows = mine.shape[0] * over.size
    elements = rows * mine.shape[1]
    out = _buffer(over, "gathered", elements, mine.dtype, mine.device).memory[:elements].view(rows, mine.shape[1])
    return torch.ops.symm_mem.multimem_all_gather_out(mine.contiguous(), _name(over), out).clone()


def _buffer(over: RankGroup, use: str, elements: int, dtype: torch.dtype, device: torch.device) -> _Buffer:
    """Return a buffer of that many elements or more, mapped once; it grows at the same calls on every rank."""
    import torch.distributed._symmetric_memory as symmetric_memory

    mapped, key = _buffers.setdefault(over.group or torch.distributed.group.WORLD, {}), (dtype, device, use)
    if key not in mapped or mapped[key].memory.numel() < elements:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch marks the interface as one that may change
            memory = symmetric_memory.empty(elements, dtype=dtype, device=device)
            mapped[key] = _Buffer(memory, symmetric_memory.rendezvous(memory, _name(over)))
    return mapped[key]


def _name(over: RankGroup) -> Any:
    group: Any = over.group or torch.distributed.group.WORLD
    return group.group_name

"""Batches from one rank of a group to the others, checked by all of them before any of it is sent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared_specs.errors import SpecError, error_text
from tiled_torch.collectives.failures import run_collective
from tiled_torch.collectives.groups import RankGroup, backend_of, not_compiled, rank_group
from tiled_torch.core.tensors import is_dtensor

_NAME = "broadcast_data"


@not_compiled
def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
) -> dict[str, Tensor]:
    """Return the tensors that rank 0 of a group has under `keys`, on every rank of the group.

    First, all ranks exchange a few bytes that say what each rank requests and has. If anything is wrong on one rank, all ranks
    raise the same error, and no rank waits for one that has failed. Then the tensors follow, in one broadcast per dtype.

    Args:
        keys: names of the tensors, the same set on every rank. Other entries on rank 0 are not sent.
        data: on rank 0 of the group, a tensor for each key. On the others None, or tensors with the expected shapes and
            dtypes; for the keys they hold, these must match rank 0's.
        dtype: the dtype of every tensor; None: each tensor's dtype on rank 0.
        device: where the results are; None: the current GPU for a group of NCCL, else the CPU.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        The tensors in the order of this rank's keys, without gradients. Rank 0 gets its own tensors, copied only if `device`
        is another device.
    Memory: during the broadcast, a second copy of each dtype's tensors, in one buffer.
    Raises:
        SpecError, on every rank: ranks ask for other keys or dtypes, a key is missing on rank 0, a tensor is of another
            dtype than `dtype`, a rank expects another shape or dtype, or an argument is of a wrong kind.
        SpecError, TypeError, UnsupportedError, on this rank: as `rank_group` for the group itself. RuntimeError with the rank
            and the call, after the group's timeout: another rank did not make the call.
    Source: the call is Megatron-LM's (core/tensor_parallel/data.py); the exchange is this project's.
    Example:
        broadcast_data(["tokens"], batch if rank == 0 else None, torch.int64, group=mesh["tp"])
    """
    over = rank_group(_NAME, group)
    mine = _described(over, keys, data, dtype, device)
    described: list[Any] = [mine]
    if over.several:
        described = [None] * over.size
        run_collective(over, "all-gather", lambda: dist.all_gather_object(described, mine, group=over.group))
    for fault in _faults(described):
        raise SpecError(fault)
    found = _sent(over, data, described[0]["tensors"])
    place = torch.device(device) if device is not None else _device_of(over)
    return {key: found[key].to(place) for key in keys}


def _described(over: RankGroup, keys: Any, data: Any, dtype: Any, device: Any) -> dict[str, Any]:
    """Return what this rank asks for and has, in strings and integers; `fault` where that alone is wrong."""
    found: dict[str, Any] = {"fault": None, "keys": [], "dtype": None, "tensors": {}}
    found["fault"] = _kind_fault(keys, data, dtype, over.rank == 0) or _device_fault(device)
    if found["fault"] is not None:
        return found
    found["keys"], found["dtype"] = sorted(keys), None if dtype is None else str(dtype)
    for key in keys:
        if key in (data or {}):
            found["tensors"][key] = (list(data[key].shape), str(data[key].dtype))
    return found


def _kind_fault(keys: Any, data: Any, dtype: Any, first: bool) -> str | None:
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):
        return error_text(_NAME, "keys", "a sequence of strings", repr(keys))
    if len(set(keys)) < len(keys):
        return error_text(_NAME, "keys", "different from each other", list(keys))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return error_text(_NAME, "dtype", "a torch.dtype or None", type(dtype).__name__)
    if not isinstance(data, Mapping) and (first or data is not None):
        rule = "a mapping" if first else "a mapping or None"
        return error_text(_NAME, "data", rule, type(data).__name__)
    for key in keys:
        value = (data or {}).get(key)
        if key in (data or {}) and (not isinstance(value, Tensor) or is_dtensor(value)):
            return error_text(_NAME, f"data[{key!r}]", "a plain tensor", type(value).__name__)
    return None


def _device_fault(device: Any) -> str | None:
    try:
        torch.empty(0, device=None if device is None else torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:  # the last where torch was built without CUDA
        reason = str(error).partition("\n")[0]
        return error_text(_NAME, "device", "one that this rank can use, or None", repr(device), advice=reason)
    return None


def _faults(described: Sequence[dict[str, Any]]) -> list[str]:
    """Return the faults, the same on every rank."""
    faults = [
        f"{each['fault']} This is rank {rank} of {len(described)}."
        for rank, each in enumerate(described)
        if each["fault"]
    ]
    if faults:
        return faults
    first = described[0]
    for rank, each in enumerate(described):
        for name in ("keys", "dtype"):
            if each[name] != first[name]:
                rule = f"the same on every rank ({first[name]} on rank 0)"
                faults.append(error_text(_NAME, name, rule, f"{each[name]} on rank {rank}"))
    for key in first["keys"]:
        if key not in first["tensors"]:
            faults.append(error_text(_NAME, f"data[{key!r}]", "a tensor on rank 0", "nothing"))
            continue
        for rank, each in enumerate(described):
            faults += _tensor_faults(key, rank, each["tensors"].get(key), first)
    return faults


def _tensor_faults(key: str, rank: int, found: tuple[list[int], str] | None, first: dict[str, Any]) -> list[str]:
    if found is None:
        return []
    (shape, dtype), (expected, named) = found, first["tensors"][key]
    wanted = first["dtype"] or named
    if dtype != wanted:
        return [error_text(_NAME, f"data[{key!r}]", f"of dtype {wanted}", f"{dtype} on rank {rank}")]
    if shape != expected:
        return [error_text(_NAME, f"data[{key!r}]", f"{expected} as on rank 0", f"{shape} on rank {rank}")]
    return []


def _device_of(over: RankGroup) -> torch.device:
    if backend_of(over, "cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sent(over: RankGroup, data: Any, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return the broadcasts, on the device of the group. Keys travel in sorted order, whatever each rank's order is."""
    if over.rank == 0:
        found = {key: data[key].detach() for key in tensors}
        if not over.several:
            return found
    else:
        found = {}
    device = _device_of(over)
    for dtype in sorted({kind for _, kind in tensors.values()}):
        keys = sorted(key for key in tensors if tensors[key][1] == dtype)
        sizes = [math.prod(tensors[key][0]) for key in keys]
        flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        parts = dict(zip(keys, flat.split(sizes), strict=True))
        if over.rank == 0:
            for key, part in parts.items():
                part.copy_(found[key].reshape(-1))
        if flat.numel():
            run_collective(over, "broadcast", lambda flat=flat: dist.broadcast(flat, group=over.group, group_src=0))
        if over.rank:  # in memory of their own: a view would keep all of them alive, and starts at any byte
            found |= {key: part.view(tensors[key][0]).clone() for key, part in parts.items()}
    return found

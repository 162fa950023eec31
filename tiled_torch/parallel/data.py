"""Batches from one rank of a group to the others, checked by all of them before any of it is sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared_specs.errors import SpecError, error_text
from tiled_torch.functional.rows import is_dtensor
from tiled_torch.parallel.groups import RankGroup, not_compiled, rank_group

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
    """The tensors that rank 0 of a group has under `keys`, on every rank of the group.

    Every rank first hears what every rank asks for and has, in one exchange of a few bytes; what is wrong on any rank is
    then an error on all of them, with the same text, and nobody waits for a rank that has given up. The tensors follow in
    one broadcast for each dtype among them.

    Args:
        keys: names of the tensors, the same set on every rank. What rank 0 has beside them stays where it is.
        data: on rank 0 of the group, a tensor for each key. On the others None, or tensors of the shapes and dtypes that
            are expected: whatever keys they hold must be like rank 0's.
        dtype: of every tensor; None: that of each on rank 0.
        device: where the results are; None: the current GPU for a group of NCCL, else the CPU.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        The tensors in the order of this rank's keys, without gradients. Rank 0 gets its own, copied only to another
        device.
    Memory: each dtype's tensors a second time, in one buffer, while they travel.
    Raises:
        SpecError, on every rank: ranks ask for other keys or dtypes, a key is missing on rank 0, a tensor is of another
            dtype than `dtype`, a rank expects another shape or dtype, or an argument is of a wrong kind.
        SpecError, TypeError, UnsupportedError, on this rank: as `rank_group` for the group itself.
    Source: the call is Megatron-LM's (core/tensor_parallel/data.py); the exchange is this project's.
    Example:
        broadcast_data(["tokens"], batch if rank == 0 else None, torch.int64, group=mesh["tp"])
    """
    over = rank_group(_NAME, group)
    mine = _described(over, keys, data, dtype)
    described: list[Any] = [mine]
    if over.several:
        described = [None] * over.size
        dist.all_gather_object(described, mine, group=over.group)
    for fault in _faults(described):
        raise SpecError(fault)
    place = torch.device(device) if device is not None else _device_of(over)
    return _sent(over, list(keys), data, described[0]["tensors"], place)


def _described(over: RankGroup, keys: Any, data: Any, dtype: Any) -> dict[str, Any]:
    """What this rank asks for and has, in strings and integers; `fault` where that alone is wrong."""
    found: dict[str, Any] = {"fault": None, "keys": [], "dtype": None, "tensors": {}}
    found["fault"] = _kind_fault(keys, data, dtype, over.rank == 0)
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
        if value is not None and (not isinstance(value, Tensor) or is_dtensor(value)):
            return error_text(_NAME, f"data[{key!r}]", "a plain tensor", type(value).__name__)
    return None


def _faults(described: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong, the same on every rank."""
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
    if "nccl" in dist.get_backend(over.group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sent(
    over: RankGroup, keys: list[str], data: Any, tensors: dict[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """The broadcasts. Keys travel in sorted order, whatever each rank's order is."""
    if over.rank == 0:
        found = {key: data[key].detach().to(device) for key in keys}
        if not over.several:
            return found
    else:
        found = {
            key: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for key, (shape, dtype) in tensors.items()
        }
    for dtype in sorted({named for _, named in tensors.values()}):
        together = [found[key] for key in sorted(tensors) if tensors[key][1] == dtype]
        flat = torch.cat([one.reshape(-1) for one in together])
        if not flat.numel():
            continue
        dist.broadcast(flat, group=over.group, group_src=0)
        if over.rank:
            for one, part in zip(together, flat.split([one.numel() for one in together]), strict=True):
                one.copy_(part.view(one.shape))
    return {key: found[key] for key in keys}

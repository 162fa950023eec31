"""Megatron-core's `broadcast_data`: what the first rank of a tensor-parallel group has, on all of its ranks."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiled_torch.collectives import broadcast_data as broadcasts
from tiled_torch.collectives.groups import rank_group
from tiled_torch.compat.megatron.parallel_state import group_or_default


def broadcast_data(
    keys: Sequence[Hashable], data: Mapping[Any, Tensor] | None, datatype: torch.dtype, tp_group: Any = None
) -> dict[Any, Tensor]:
    """Return the tensors that rank 0 of a group has under `keys`, on every rank of the group.

    Args:
        keys: the same on every rank, of any hashable kind. data: read on rank 0 of the group only.
        datatype: of every tensor. tp_group: the tensor-parallel group; None: `parallel_state`'s.
    Returns:
        The tensors, on the current GPU for a group of NCCL, else on the CPU.
    Memory, Raises: as `tiled_torch.parallel.broadcast_data`.
    Source: named and called as Megatron-core's (core/tensor_parallel/data.py).
    """
    group = group_or_default(tp_group)
    named = {repr(key): key for key in keys}
    first = rank_group("broadcast_data", group).rank == 0
    given = {name: data[key] for name, key in named.items() if key in data} if first and data is not None else None
    found = broadcasts.broadcast_data(list(named), given, datatype, group=group)
    return {named[name]: tensor for name, tensor in found.items()}

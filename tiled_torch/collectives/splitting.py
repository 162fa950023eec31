"""Tensors cut into equal parts, under the names that Megatron-LM gives these helpers."""

from typing import Any

import torch
from torch import Tensor

from shared_specs.collectives import checks as collective_checks
from shared_specs.core import checks
from shared_specs.errors import fail_type
from tiled_torch.collectives.conjugates import Join, Split, move, own_part
from tiled_torch.collectives.groups import not_compiled, rank_group
from tiled_torch.core.tensors import refuse_dtensor


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return `num_partitions` equal parts of the last dim, in order.

    Args:
        tensor: [..., n]. num_partitions: a divisor of n, >= 1.
        contiguous_split_chunks: True returns contiguous copies, False returns views.
    Raises:
        SpecError, TypeError: the tensor cannot be split this way.
    Source: Megatron-LM, core/tensor_parallel/utils.py.
    Example:
        >>> import torch
        >>> [part.shape for part in split_tensor_along_last_dim(torch.ones(2, 6), 2)]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    name = "split_tensor_along_last_dim"
    _check(name, tensor)
    checks.check_flags(name, contiguous_split_chunks=contiguous_split_chunks)
    size = collective_checks.check_partitions(name, num_partitions, tuple(tensor.shape))
    parts = tensor.split(size, -1) if size else (tensor,) * num_partitions
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


@not_compiled
def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, *, group: Any = None) -> Tensor:
    """Return this rank's slice of the flattened elements of a tensor that all ranks have.

    Args:
        tensor: of any shape; R divides its number of elements.
        new_buffer: True returns a copy, False a view of a contiguous tensor. If a gradient is needed, the result is a copy.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [elements / R]. Its gradient is gathered, so every rank gets the same whole gradient.
    Raises:
        SpecError: the number of elements is no multiple of R. TypeError, UnsupportedError: not a tensor; no process group.
    Source: Megatron-LM, core/tensor_parallel/utils.py (which drops a remainder).
    """
    name = "split_tensor_into_1d_equal_chunks"
    _check(name, tensor)
    checks.check_flags(name, new_buffer=new_buffer)
    over = rank_group(name, group)
    collective_checks.check_elements(name, tuple(tensor.shape), over.size)
    flat = tensor.reshape(-1)
    if flat.requires_grad and torch.is_grad_enabled():
        return move(flat, over, Split(0), Join(0))
    part = own_part(over, flat, 0)
    return part.clone() if new_buffer else part


@not_compiled
def gather_split_1d_tensor(tensor: Tensor, *, group: Any = None) -> Tensor:
    """Concatenate the elements of all ranks: the inverse of `split_tensor_into_1d_equal_chunks`.

    Args:
        tensor: of any shape, the same on every rank. group: as there.
    Returns:
        [elements R], the same on every rank; each rank's gradient is its own slice. The caller reshapes the result.
    Raises:
        TypeError, UnsupportedError: as there.
    """
    name = "gather_split_1d_tensor"
    _check(name, tensor)
    return move(tensor.reshape(-1), rank_group(name, group), Join(0), Split(0))


def _check(function: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        fail_type(function, "tensor", "an array", type(tensor).__name__)
    refuse_dtensor(function, "tensor", tensor, "Pass this rank's part: to_local().")

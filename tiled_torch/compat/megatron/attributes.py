"""The marks of tensor-parallel parameters by Megatron-core's names, with the further ones that its engines read."""

from typing import Any

import torch
from torch import Tensor

from shared_specs.errors import fail_with
from tiled_torch.collectives import split_module
from tiled_torch.compat.megatron.parallel_state import group_or_default

_FURTHER = {"expert_tp": False, "is_qkv": False, "qkv_split_shapes": None}
_GTP = ("is_gtp_weight_remat", "allreduce", "gtp_replica_group", "pad_length")


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a tensor: as `tiled_torch.parallel.set_tensor_model_parallel_attributes`.

    Raises:
        SpecError: it is marked already.
    """
    marked = [attribute for attribute in _FURTHER if hasattr(tensor, attribute)]
    if marked:
        name = "set_tensor_model_parallel_attributes"
        fail_with(name, f"tensor is marked already: it has {marked[0]}", advice="Delete its marks first.")
    split_module.set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as whole on every rank, as no expert's and no query, key or value weight, where it does not say."""
    split_module.set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    for attribute, value in _FURTHER.items():
        if not hasattr(tensor, attribute):
            setattr(tensor, attribute, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Mark a copy as what it was copied from is marked."""
    split_module.copy_tensor_model_parallel_attributes(destination_tensor, source_tensor)
    _copy(destination_tensor, source_tensor, tuple(_FURTHER))


def copy_gtp_attributes(destination: Tensor, source: Tensor) -> None:
    """Copy the marks of Megatron-core's generalised tensor parallelism, which these layers never set."""
    _copy(destination, source, _GTP)


def _copy(destination: Tensor, source: Tensor, names: tuple[str, ...]) -> None:
    for attribute in names:
        if hasattr(source, attribute):
            setattr(destination, attribute, getattr(source, attribute))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
    """Return whether this rank is to count a parameter: a part of its own, or the first of the same copies.

    Args:
        tp_group, expert_tp_group: with a `rank()`; the second is asked for parameters marked allreduce=False.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    expert = not getattr(param, "allreduce", True) and expert_tp_group is not None
    group = expert_tp_group if expert else group_or_default(tp_group)
    return (torch.distributed.get_rank() if group is None else group.rank()) == 0


def param_is_not_gtp_duplicate(param: Tensor) -> bool:
    """Return True: there is no such axis here, over which a parameter could have copies."""
    del param
    return True

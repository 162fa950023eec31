"""What every module with parameters split over ranks shares: its group, where each part lies in the whole, and its marks.

The marks, by which training engines know such parameters, have the names that Megatron-LM gives them.
"""

import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from shared_specs.errors import fail_type, fail_with
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.initialise import mark


class Partition(NamedTuple):
    """Where a parameter's part lies in the whole: along `dim`, in `stride` equal runs; `size` of the whole along `dim`."""

    dim: int
    stride: int
    size: int


class ParallelLayer(nn.Module):
    """A module that owns this rank's parts. `partitions`: of every parameter that is split; the others are whole."""

    group: Any
    partitions: dict[str, Partition]
    expert: bool

    def _settle(self, group: Any, device: Any, dtype: Any) -> None:
        self.group, self.partitions, self.expert = group, {}, False
        self._like = {"device": device, "dtype": dtype}
        over = rank_group(type(self).__name__, group)
        self.rank, self.ranks = over.rank, over.size

    def _parameter(self, name: str, shape: tuple[int, ...], partition: Partition | None) -> None:
        if partition is not None:
            self.partitions[name] = partition
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._like)))
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Set `tensor_model_parallel`, `partition_dim`, `partition_stride` and `allreduce` on every parameter.

        They are attributes, which a copy of a parameter loses. The layer sets them again where it makes the copies itself
        (`to`, `to_empty`, `deepcopy`); call this after something else has put parameters of its own there, as fully_shard
        does.
        """
        for name, parameter in self._parameters.items():
            if parameter is not None:
                partition = self.partitions.get(name)
                dim, stride = (None, 1) if partition is None else partition[:2]
                mark(parameter, dim, stride, allreduce=not self.expert)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Also a strict load takes the `_extra_state` of a Megatron-LM checkpoint, which is ignored as it is there.

        Transformer Engine writes its recipe of 8-bit formats in it. These layers write none.
        """
        state_dict.pop(f"{prefix}_extra_state", None)  # of a copy: load_state_dict makes one
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        applied = super()._apply(fn, recurse)
        self.mark_parameters()
        return applied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # a process group cannot be copied, and is the same one
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied.mark_parameters()
        return copied


# Of a tensor that says nothing.
ATTRIBUTE_DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
_COPIED = (*ATTRIBUTE_DEFAULTS, "allreduce", "sequence_parallel")


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set `tensor_model_parallel`, `partition_dim` and `partition_stride` on a tensor: it is this rank's part, or it is whole.

    Args:
        is_parallel: whether each rank holds a different part. dim: the split dim, -1 for a whole tensor.
        stride: the number of equal runs that this rank's part consists of, one of each fused part.
    Raises:
        SpecError: the tensor already has these attributes. The layers of this package set them on their own parameters.
    """
    name = "set_tensor_model_parallel_attributes"
    _check(name, "tensor", tensor)
    marked = [attribute for attribute in ATTRIBUTE_DEFAULTS if hasattr(tensor, attribute)]
    if marked:
        fail_with(name, f"tensor is marked already: it has {marked[0]}", advice="Delete its marks first.")
    for attribute, value in zip(ATTRIBUTE_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, attribute, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set `tensor_model_parallel`, `partition_dim` and `partition_stride`, if missing, to the values of a whole tensor."""
    _check("set_defaults_if_not_set_tensor_model_parallel_attributes", "tensor", tensor)
    for attribute, value in ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, attribute):
            setattr(tensor, attribute, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the tensor-parallel attributes of a tensor to its copy, such as an optimizer's float32 copy.

    It also copies `allreduce` (of an expert) and `sequence_parallel`, so that `get_grad_norm` counts the copies like the
    parameters.
    """
    name = "copy_tensor_model_parallel_attributes"
    _check(name, "destination_tensor", destination_tensor)
    _check(name, "source_tensor", source_tensor)
    for attribute in _COPIED:
        if hasattr(source_tensor, attribute):
            setattr(destination_tensor, attribute, getattr(source_tensor, attribute))


def param_is_not_tensor_parallel_duplicate(param: Tensor, group: Any = None, expert_group: Any = None) -> bool:
    """Return whether this rank counts a parameter: it holds its own part, or the first of equal copies.

    Args:
        param: with the attributes that the layers of this package set; without them it is whole.
        group: the tensor-parallel process group, a DeviceMesh of one dim, or None for all ranks.
        expert_group: the group of the experts, whose parameters have allreduce=False; None: `group`.
    Raises:
        SpecError, TypeError, UnsupportedError: not a group that contains this rank.
    """
    name = "param_is_not_tensor_parallel_duplicate"
    _check(name, "param", param)
    if getattr(param, "tensor_model_parallel", False):
        return True
    expert = expert_group is not None and not getattr(param, "allreduce", True)
    return rank_group(name, expert_group if expert else group).rank == 0


def _check(function: str, argument: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        fail_type(function, argument, "an array", type(tensor).__name__)

"""What every module with parameters split over ranks shares: its group, and where each parameter's part lies in the whole."""

import copy
from typing import Any, NamedTuple, Self

import torch
from torch import nn

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
        """Sets `tensor_model_parallel`, `partition_dim`, `partition_stride` and `allreduce` on every parameter.

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

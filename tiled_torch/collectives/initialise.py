"""Parameters split over ranks whose initial values are slices of one master, the same at every number of ranks.

Every rank draws the whole master from the same random state and keeps its part, so that the ranks' generators stay alike.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shared_specs.errors import fail_type
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.core.tensors import is_dtensor

InitMethod = Callable[[Tensor], Any]  # fills a tensor in place


def own_slice(master: Tensor, over: RankGroup, dim: int, stride: int = 1) -> Tensor:
    """Return this rank's part along `dim`: of each of the `stride` equal parts of a fused master, one after the other."""
    parts = master.unflatten(dim, (stride, over.size, master.shape[dim] // (stride * over.size)))
    return parts.select(dim + 1, over.rank).flatten(dim, dim + 1)


def check_init_method(function: str, init_method: object) -> None:
    """Check that `init_method` is a function or None.

    Raises:
        TypeError: it cannot be called.
    """
    if init_method is not None and not callable(init_method):
        fail_type(
            function, "init_method", "a function that fills a tensor in place, or None", type(init_method).__name__
        )


@torch.no_grad()
def linear_master(
    in_features: int, out_features: int, bias: bool, init_method: InitMethod | None, like: dict[str, Any]
) -> nn.Linear:
    """Return the whole layer: as nn.Linear initialises itself, or by init_method with a bias of zero.

    `like`: device and dtype. Memory: the whole weight, until its part has been copied.
    """
    master = nn.Linear(in_features, out_features, bias=bias, **like)
    if init_method is not None:
        init_method(master.weight)
        if bias:
            nn.init.zeros_(master.bias)
    return master


@torch.no_grad()
def embedding_master(entries: int, dim: int, init_method: InitMethod | None, like: dict[str, Any]) -> Tensor:
    """Return the whole embedding: standard normal as nn.Embedding's, or by init_method."""
    master = torch.empty(entries, dim, **like)
    (init_method or nn.init.normal_)(master)
    return master


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy the values in; of a parameter that fully_shard has sharded, the part of this process. Nothing is communicated."""
    if is_dtensor(parameter):
        fill_local(parameter, values)
    else:
        parameter.copy_(values)


def mark(parameter: Tensor, dim: int | None, stride: int = 1, *, allreduce: bool = True) -> None:
    """The attributes by which training engines know tensor-parallel parameters (Megatron's names).

    dim None: the same on every rank. allreduce False: its gradient is not for the ordinary data-parallel group.
    """
    parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
    parameter.partition_dim = -1 if dim is None else dim  # type: ignore[attr-defined]
    parameter.partition_stride = stride  # type: ignore[attr-defined]
    parameter.allreduce = allreduce  # type: ignore[attr-defined]


class Parts(Protocol):
    """A tensor, or what gives one for `...` or a tuple of slices."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


def fill_local(parameter: Tensor, whole: Parts) -> None:
    """Copy into a tensor, or into this rank's part of a DTensor, what it has of `whole`; nothing is communicated."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole[...])
        return
    shape, offset = compute_local_shape_and_global_offset(whole.shape, parameter.device_mesh, parameter.placements)
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    parameter.to_local().copy_(whole[part])

"""Parameters split over ranks whose initial values are slices of one master, the same at every number of ranks.

Every rank draws the whole master from the same random state and keeps its part, so that the ranks' generators stay alike.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import fail_type
from tiled_torch.functional.rows import is_dtensor
from tiled_torch.parallel.groups import RankGroup

InitMethod = Callable[[Tensor], Any]  # fills a tensor in place


def own_slice(master: Tensor, over: RankGroup, dim: int, stride: int = 1) -> Tensor:
    """This rank's part along `dim`: of each of the `stride` equal parts of a fused master, one after the other."""
    parts = master.unflatten(dim, (stride, over.size, master.shape[dim] // (stride * over.size)))
    return parts.select(dim + 1, over.rank).flatten(dim, dim + 1)


def check_init_method(function: str, init_method: object) -> None:
    if init_method is not None and not callable(init_method):
        fail_type(
            function, "init_method", "a function that fills a tensor in place, or None", type(init_method).__name__
        )


@torch.no_grad()
def linear_master(
    in_features: int, out_features: int, bias: bool, init_method: InitMethod | None, like: dict[str, Any]
) -> nn.Linear:
    """The whole layer: as nn.Linear initialises itself, or by init_method with a bias of zero.

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
    """The whole embedding: standard normal as nn.Embedding's, or by init_method."""
    master = torch.empty(entries, dim, **like)
    (init_method or nn.init.normal_)(master)
    return master


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copies them in; of a parameter that fully_shard has sharded, what this process holds. Nothing is communicated."""
    if is_dtensor(parameter):
        from tiled_torch.parallel.meta_device import fill_local  # DTensor takes seconds to import

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

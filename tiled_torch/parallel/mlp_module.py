"""`TensorParallelTiledMLP`: this rank's part of an MLP's parameters and one call of `tensor_parallel_mlp`. No math."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs import checks
from shared_specs.config import TORCH, Activation, Tiling
from shared_specs.partitions import even_range
from shared_specs.sequence_checks import check_sequence_parallel
from tiled_torch import backends
from tiled_torch.parallel.groups import rank_group
from tiled_torch.parallel.mlp import tensor_parallel_mlp

_NAME = "TensorParallelTiledMLP"


class TensorParallelTiledMLP(nn.Module):
    """`TiledMLP` with gate and up split by column and down by row over the ranks of a group, computed shard by shard.

    Args:
        hidden_size, intermediate_size: H and I of the whole MLP; the ranks divide I.
        activation, gated, bias: as in `TiledMLP`.
        sequence_parallel: x and y are each rank's own tokens, gathered and scattered one shard at a time.
        num_shards, keep, tiling, backend, group: as in `tensor_parallel_mlp`.
        device, dtype: of the parameters.
    Parameters are this rank's slices of those of `TiledMLP`: `w_gate`, `w_up` [I / R, H], `w_down` [H, I / R] and, with bias,
    `b_gate`, `b_up` [I / R], `b_down` [H], the same on every rank. Each says so by the attributes `tensor_model_parallel`,
    `partition_dim` (-1 where it is whole) and `partition_stride`. Every rank draws the whole weight, one matrix at a time, and
    keeps its slice: ranks that start from one seed hold the parameters that `TiledMLP` draws from it, at any number of ranks.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tensor_parallel_mlp`, at construction; SpecError where the ranks do not
            divide I.
    Source: derived in shared_specs/README.md; the split is Megatron-LM's, arXiv 1909.08053.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        sequence_parallel: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_sizes(_NAME, {"hidden_size": hidden_size, "intermediate_size": intermediate_size})
        checks.check_activation(_NAME, activation)
        check_sequence_parallel(_NAME, sequence_parallel)
        checks.check_backend(_NAME, backend, TORCH, backends.usable_backends())
        over = rank_group(_NAME, group)
        self.columns = even_range(_NAME, "intermediate_size", intermediate_size, over.size, over.rank)
        self.hidden_size, self.intermediate_size, self.group = hidden_size, intermediate_size, group
        self.activation, self.gated, self.sequence_parallel = activation, gated, sequence_parallel
        self.tiling, self.backend = checks.resolve_tiling(_NAME, num_shards, keep, tiling), backend
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        local = self.columns[1] - self.columns[0]
        for name in ("gate", "up") if gated else ("up",):
            self._register(f"w_{name}", torch.empty(local, hidden_size, **kind), 0)
            if bias:
                self._register(f"b_{name}", torch.empty(local, **kind), 0)
        self._register("w_down", torch.empty(hidden_size, local, **kind), 1)
        if bias:
            self._register("b_down", torch.empty(hidden_size, **kind), -1)
        self.reset_parameters()

    def _register(self, name: str, tensor: Tensor, dim: int) -> None:
        parameter: Any = nn.Parameter(tensor)
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = dim >= 0, dim, 1
        setattr(self, name, parameter)

    def reset_parameters(self) -> None:
        """Draws every parameter anew, uniformly within 1/sqrt(inputs of the whole layer), as nn.Linear does."""
        for name, parameter in self.named_parameters():
            inputs = self.intermediate_size if name.endswith("_down") else self.hidden_size
            dim: int = parameter.partition_dim  # type: ignore[attr-defined]
            shape = [self.intermediate_size if at == dim else size for at, size in enumerate(parameter.shape)]
            bound = 1 / math.sqrt(inputs)
            with torch.no_grad():
                whole = nn.init.uniform_(parameter.new_empty(shape), -bound, bound)
                start, stop = self.columns
                parameter.copy_(whole if dim < 0 else whole.narrow(dim, start, stop - start))

    def forward(self, x: Tensor, *, split_sizes: Sequence[int] | None = None) -> Tensor:
        """[..., H] -> [..., H]. split_sizes: as in `tensor_parallel_mlp`."""
        biases = {name: getattr(self, f"b_{name}", None) for name in ("gate", "up", "down")}
        return tensor_parallel_mlp(
            x,
            getattr(self, "w_gate", None),
            self.w_up,  # type: ignore[arg-type]
            self.w_down,  # type: ignore[arg-type]
            biases={name: bias for name, bias in biases.items() if bias is not None},
            activation=self.activation,
            sequence_parallel=self.sequence_parallel,
            split_sizes=split_sizes,
            tiling=self.tiling,
            backend=self.backend,
            group=self.group,
        )

    def extra_repr(self) -> str:
        kind = "gated" if self.gated else "plain"
        split = f"features {self.columns[0]} to {self.columns[1]} of {self.intermediate_size}"
        return (
            f"{kind}, activation={self.activation}, {split}, sequence_parallel={self.sequence_parallel}, {self.tiling}"
        )

"""`TensorParallelTiledMLP`: this rank's part of an MLP's parameters and one call of `tensor_parallel_mlp`. No math."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.collectives.agreement import check_sequence_parallel
from shared_specs.collectives.partitions import even_range
from shared_specs.config import TORCH, Activation, Tiling
from shared_specs.mlp import checks as mlp_checks
from tiled_torch import backends
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.initialise import fill, own_slice
from tiled_torch.collectives.split_module import ParallelLayer, Partition
from tiled_torch.core.activation_functions import ActivationFunction, activation_name
from tiled_torch.mlp.module import MLPParameters, projection_order
from tiled_torch.mlp.ranks import tensor_parallel_mlp

_NAME = "TensorParallelTiledMLP"


class TensorParallelTiledMLP(MLPParameters, ParallelLayer):
    """`TiledMLP` with gate and up split by column and down by row over the ranks of a group, computed shard by shard.

    Args:
        hidden_size, intermediate_size: H and I of the whole MLP. The number of ranks must divide I.
        activation, gated, bias, fused_gate_up: as in `TiledMLP`.
        sequence_parallel: x and y are each rank's own tokens, gathered and scattered one shard at a time.
        num_shards, keep, tiling, backend, group: as in `tensor_parallel_mlp`.
        device, dtype: of the parameters.
    Parameters are this rank's slices of those of `TiledMLP`: `w_gate`, `w_up` [I / R, H], `w_down` [H, I / R] and, with bias,
    `b_gate`, `b_up` [I / R], `b_down` [H], the same on every rank; fused, `w_gate_up` [2 I / R, H] and `b_gate_up`, the rank's
    rows of gate before those of up. Each has the attributes `tensor_model_parallel`, `partition_dim` (-1 if it is whole) and
    `partition_stride` (2 if it is fused). Every rank draws the whole weight, one matrix at a time, and keeps its slice. So
    ranks with one seed hold the parameters that `TiledMLP` draws from that seed, at any number of ranks. `sharded_state_dict`
    has the keys and shapes of `TiledMLP`. So torch.distributed.checkpoint can save from one and load into the other, also at a
    different number of ranks.
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
        activation: Activation | ActivationFunction = "silu",
        gated: bool = True,
        bias: bool = False,
        fused_gate_up: bool = False,
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
        kind = {"gated": gated, "bias": bias, "fused_gate_up": fused_gate_up}
        shapes = mlp_checks.module_shapes(_NAME, hidden_size, intermediate_size, **kind, names=TORCH)
        check_sequence_parallel(_NAME, sequence_parallel)
        name_of_activation = activation_name(_NAME, activation)
        options = (name_of_activation, gated, fused_gate_up, num_shards, keep, tiling, backend)
        self.tiling = mlp_checks.module_tiling(_NAME, *options, names=TORCH, usable=backends.usable_backends())
        self._settle(group, device, dtype)
        self.columns = even_range(_NAME, "intermediate_size", intermediate_size, self.ranks, self.rank)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation, self.backend = name_of_activation, backend
        self.gated, self.fused_gate_up = gated, fused_gate_up
        self.sequence_parallel = sequence_parallel
        stride = 2 if fused_gate_up else 1
        rows, columns = Partition(0, stride, stride * intermediate_size), Partition(1, 1, intermediate_size)
        for name in projection_order(shapes):
            partition = None if name == "b_down" else columns if name == "w_down" else rows
            shape = list(shapes[name])
            if partition is not None:
                shape[partition.dim] //= self.ranks
            self._parameter(name, tuple(shape), partition)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter again, uniformly within 1/sqrt(inputs of the whole layer), as nn.Linear does.

        It also works after `to_empty` of a module made on the meta device, and for parameters that are sharded further.
        """
        over = rank_group(_NAME, self.group)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            partition, shape = self.partitions.get(name), list(parameter.shape)
            if partition is not None:
                shape[partition.dim] = partition.size
            bound = 1 / math.sqrt(self.intermediate_size if name.endswith("_down") else self.hidden_size)
            whole = nn.init.uniform_(torch.empty(shape, dtype=parameter.dtype, device=parameter.device), -bound, bound)
            fill(parameter, whole if partition is None else own_slice(whole, over, partition.dim, partition.stride))

    def forward(self, x: Tensor, *, split_sizes: Sequence[int] | None = None) -> Tensor:
        """[..., H] -> [..., H]. split_sizes: as in `tensor_parallel_mlp`."""
        weights, biases = self._operands()
        return tensor_parallel_mlp(
            x,
            *weights,
            biases=biases,
            activation=self.activation,  # type: ignore[arg-type]
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

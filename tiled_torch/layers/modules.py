"""Linear and embedding layers that own this rank's part of their weights. No math: one call of the functional form each."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.config import ParallelLinearOptions
from shared_specs.core import checks
from shared_specs.errors import fail, show_shape
from shared_specs.layers import checks as layer_checks
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.initialise import (
    InitMethod,
    check_init_method,
    embedding_master,
    fill,
    linear_master,
    own_slice,
)
from tiled_torch.collectives.split_module import ParallelLayer, Partition
from tiled_torch.layers.embedding import vocab_parallel_embedding
from tiled_torch.layers.linear import (
    DEFAULTS,
    column_parallel_linear,
    gathered_bias,
    row_bias,
    row_parallel_linear,
)
from tiled_torch.layers.linear_autodiff import deferred_weight_grad


class _ParallelLinear(ParallelLayer):
    """A linear layer split along `dim` of its weight."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _build(
        self,
        dim: int,
        sizes: tuple[int, int],
        bias: bool,
        flags: dict[str, bool],
        init_method: InitMethod | None,
        options: ParallelLinearOptions,
        group: Any,
        allocate: bool = True,
    ) -> None:
        name = type(self).__name__
        checks.check_sizes(name, {"in_features": sizes[0], "out_features": sizes[1]})
        layer_checks.check_flags(name, bias=bias, **flags)
        layer_checks.check_linear_options(
            name,
            options,
            kind="row" if dim else "column",
            sequence_parallel=flags["sequence_parallel"],
            group_given=group is not None,
        )
        check_init_method(name, init_method)
        layer_checks.check_split(name, ("out_features", "in_features")[dim], sizes[1 - dim], self.ranks, options.stride)
        self.in_features, self.out_features = sizes
        self.options, self.init_method, self.has_bias, self.expert = options, init_method, bias, options.is_expert
        self.sequence_parallel, self.skip_bias_add = flags["sequence_parallel"], flags["skip_bias_add"]
        shape = [sizes[1], sizes[0]]
        partition = Partition(dim, options.stride, shape[dim])
        shape[dim] //= self.ranks
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if allocate:
            self._parameter("weight", tuple(shape), partition)
        if bias:
            self._parameter("bias", (shape[0],), None if dim else partition)
        self.weight_shape = tuple(shape)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Slices of a newly drawn master, also after `to_empty` of a layer made on the meta device or sharded once more."""
        owned = {name: one for name in ("weight", "bias") if (one := getattr(self, name)) is not None}
        if not owned or any(one.is_meta for one in owned.values()):
            return
        like = {"device": next(iter(owned.values())).device, "dtype": next(iter(owned.values())).dtype}
        master = linear_master(self.in_features, self.out_features, self.has_bias, self.init_method, like)
        over = rank_group(type(self).__name__, self.group)
        for name, mine in owned.items():
            whole, partition = getattr(master, name), self.partitions.get(name)
            fill(mine, whole if partition is None else own_slice(whole, over, partition.dim, partition.stride))

    def deferred_weight_grad(self) -> int:
        """Compute what options.defer_weight_grad left out, for this layer's own weight: see `deferred_weight_grad`."""
        return 0 if self.weight is None else deferred_weight_grad(self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank {self.rank} of {self.ranks}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are split over the ranks of a group: `column_parallel_linear` with parameters.

    Args:
        in_features, out_features: sizes of the whole layer; R divides out_features.
        bias: whether the layer has a bias, split like the outputs.
        gather_output: return all outputs on every rank.
        sequence_parallel: x is this rank's tokens.
        skip_bias_add: return (y, bias) without adding the bias, for a fused addition elsewhere. If outputs are gathered, the
            bias is too.
        allocate_weight: the layer owns a weight. False: each call passes the weight.
        init_method: fills the whole weight [out, in] in place, with a zero bias; None: as nn.Linear.
        options: see shared_specs.config.ParallelLinearOptions; is_expert needs an explicit group, such as
            mesh["expert_tp"] of a mesh with that dim.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
        device, dtype: of the parameters.
    Parameters: weight [out / R, in], bias [out / R], with the attributes `tensor_model_parallel`, `partition_dim`,
    `partition_stride` and `allreduce` (False on an expert's). `mark_parameters` describes when to set them again. With equal
    random states, the parameters are slices of the same whole weight at every R; its random numbers are those of
    nn.Linear(in_features, out_features). So build a model under torch.manual_seed with one seed for all ranks, and an expert
    under a seed that only the ranks of its group share. Call `seed_parallel` afterwards, because data ranks differ after that
    call.
    Memory: the whole weight once, while it is initialised. The rest: as `column_parallel_linear`.
    Raises:
        SpecError, TypeError, UnsupportedError: as `column_parallel_linear`; SpecError where R does not divide.
    Source: Megatron-LM, arXiv 1909.08053 section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        allocate_weight: bool = True,
        init_method: InitMethod | None = None,
        options: ParallelLinearOptions = DEFAULTS,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._settle(group, device, dtype)
        flags = {
            "gather_output": gather_output,
            "sequence_parallel": sequence_parallel,
            "skip_bias_add": skip_bias_add,
            "allocate_weight": allocate_weight,
        }
        self.gather_output = gather_output
        self._build(0, (in_features, out_features), bias, flags, init_method, options, group, bool(allocate_weight))
        if options.explicit_expert_comm:
            layer_checks.check_explicit(type(self).__name__, gather_output=(gather_output, False))

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        split_sizes: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y, or (y, bias) with skip_bias_add. weight: used instead of the layer's own. runtime_gather_output: None: the
        layer's gather_output. split_sizes: the number of tokens of every rank, with sequence_parallel."""
        name = type(self).__name__
        if weight is None:
            weight = self.weight
        elif isinstance(weight, Tensor) and tuple(weight.shape) != self.weight_shape:
            fail(name, "weight", show_shape(self.weight_shape), show_shape(tuple(weight.shape)))
        if weight is None:
            fail(name, "weight", "given to a layer made with allocate_weight=False", None)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        y = column_parallel_linear(
            x,
            weight,
            None if self.skip_bias_add else self.bias,
            gather_output=gather,
            sequence_parallel=self.sequence_parallel,
            split_sizes=split_sizes,
            options=self.options,
            group=self.group,
        )
        if not self.skip_bias_add:
            return y
        if self.bias is None or not gather:
            return y, self.bias
        return y, gathered_bias(self.bias, rank_group(name, self.group), self.options.stride)


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are split over the ranks of a group: `row_parallel_linear` with parameters.

    Args:
        in_features, out_features: sizes of the whole layer; R divides in_features.
        bias: whether the layer has a bias, the same on every rank.
        input_is_parallel: x is this rank's slice of the features. sequence_parallel: return this rank's tokens.
        skip_bias_add, init_method, options, group, device, dtype: as `ColumnParallelLinear`.
    Parameters: weight [out, in / R], bias [out]. The bias is whole on every rank: its `tensor_model_parallel` is False.
    Memory, Raises, Source: as `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
        options: ParallelLinearOptions = DEFAULTS,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._settle(group, device, dtype)
        flags = {
            "input_is_parallel": input_is_parallel,
            "sequence_parallel": sequence_parallel,
            "skip_bias_add": skip_bias_add,
        }
        if sequence_parallel and not input_is_parallel:
            fail(type(self).__name__, "input_is_parallel", "True with sequence_parallel", input_is_parallel)
        self.input_is_parallel = input_is_parallel
        self._build(1, (in_features, out_features), bias, flags, init_method, options, group)
        layer_checks.check_explicit_bias(type(self).__name__, options, added=bias and not skip_bias_add)
        if options.explicit_expert_comm:
            layer_checks.check_explicit(type(self).__name__, input_is_parallel=(input_is_parallel, True))

    def forward(self, x: Tensor, split_sizes: Sequence[int] | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y, or (y, bias) with skip_bias_add. split_sizes: the number of tokens of every rank's result, with
        sequence_parallel."""
        assert self.weight is not None
        y = row_parallel_linear(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            input_is_parallel=self.input_is_parallel,
            sequence_parallel=self.sequence_parallel,
            split_sizes=split_sizes,
            options=self.options,
            group=self.group,
        )
        if not self.skip_bias_add:
            return y
        if self.bias is None or not self.sequence_parallel:
            return y, self.bias
        return y, row_bias(self.bias, rank_group("row_parallel_linear", self.group))


class VocabParallelEmbedding(ParallelLayer):
    """An embedding whose vocabulary is split over the ranks of a group: `vocab_parallel_embedding` with a parameter.

    Args:
        num_embeddings: V. Every rank holds ceil(V / R) entries. Entries beyond V on the last ranks are padding: zero and
            without gradient.
        embedding_dim: H.
        reduce_scatter_embeddings, sequence_dim, deterministic: as `vocab_parallel_embedding`.
        init_method: fills the whole [V, H] in place; None: standard normal, as nn.Embedding.
        group, device, dtype: as `ColumnParallelLinear`.
    Parameters: weight [ceil(V / R), H], with the same attributes as those of `ColumnParallelLinear`.
    Memory: the whole embedding once, while it is initialised.
    Raises, Source: as `vocab_parallel_embedding`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        reduce_scatter_embeddings: bool = False,
        sequence_dim: int = 0,
        deterministic: bool = False,
        init_method: InitMethod | None = None,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self._settle(group, device, dtype)
        checks.check_sizes(name, {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim})
        if sequence_dim != 0 and not reduce_scatter_embeddings:
            fail(name, "sequence_dim", "left out without reduce_scatter_embeddings", sequence_dim)
        flags = {"reduce_scatter_embeddings": reduce_scatter_embeddings, "deterministic": deterministic}
        layer_checks.check_flags(name, **flags)
        check_init_method(name, init_method)
        self.num_embeddings, self.embedding_dim, self.init_method = num_embeddings, embedding_dim, init_method
        self.reduce_scatter_embeddings, self.deterministic = reduce_scatter_embeddings, deterministic
        self.sequence_dim = sequence_dim
        entries = -(-num_embeddings // self.ranks)
        self._parameter("weight", (entries, embedding_dim), Partition(0, 1, num_embeddings))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole weight again and keep this rank's entries; the padding is zero."""
        if self.weight.is_meta:
            return
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        master = embedding_master(self.num_embeddings, self.embedding_dim, self.init_method, like)
        entries = self.weight.shape[0]
        mine = master[self.rank * entries : (self.rank + 1) * entries]
        fill(self.weight, F.pad(mine, (0, 0, 0, entries - mine.shape[0])))

    def forward(self, ids: Tensor, split_sizes: Sequence[int] | None = None) -> Tensor:
        """Return [*tokens, H]; with reduce_scatter_embeddings only this rank's tokens (split_sizes: the number of every
        rank)."""
        return vocab_parallel_embedding(
            ids,
            self.weight,
            vocab_size=self.num_embeddings,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            sequence_dim=self.sequence_dim,
            split_sizes=split_sizes,
            deterministic=self.deterministic,
            group=self.group,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.rank} of {self.ranks}"

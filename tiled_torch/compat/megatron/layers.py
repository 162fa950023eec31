"""Megatron-core's tensor-parallel layers by its own constructors and returns, over this library's layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.collectives.partitions import VocabUtility
from shared_specs.errors import error_text, fail, show_shape
from tiled_torch.collectives.groups import rank_group
from tiled_torch.compat.megatron.attributes import copy_gtp_attributes as copy_gtp_attributes
from tiled_torch.compat.megatron.attributes import (
    copy_tensor_model_parallel_attributes as copy_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.attributes import param_is_not_gtp_duplicate as param_is_not_gtp_duplicate
from tiled_torch.compat.megatron.attributes import (
    param_is_not_tensor_parallel_duplicate as param_is_not_tensor_parallel_duplicate,
)
from tiled_torch.compat.megatron.attributes import (
    set_defaults_if_not_set_tensor_model_parallel_attributes as set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.attributes import (
    set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.config import Placement, check_unused, setting
from tiled_torch.compat.megatron.linear import linear_with_frozen_weight as linear_with_frozen_weight
from tiled_torch.compat.megatron.linear import (
    linear_with_grad_accumulation_and_async_allreduce as linear_with_grad_accumulation_and_async_allreduce,
)
from tiled_torch.layers import modules
from tiled_torch.layers.embedding import vocab_parallel_embedding
from tiled_torch.layers.linear import column_parallel_linear, row_parallel_linear

Init = Callable[[Tensor], Any]


class _MegatronLinear:
    """What both linear layers share: initialisation, marks, and an `_extra_state` of None, which a strict load may lack."""

    weight: Any
    bias: Any
    place: Placement
    config: Any
    master_weight: Tensor | None

    def _prepare(self, place: Placement, config: Any, init_method: Init, stride: int, keep_master: bool) -> None:
        self.place, self.config = place, config
        self._init, self._stride, self._keeps_master = init_method, stride, keep_master

    def _finish(self: Any, expert: bool) -> None:
        self.input_size, self.output_size = self.in_features, self.out_features
        self.is_expert, self.explicit_expert_comm = expert, self.place.explicit
        self.tp_group, self.expert = self.place.group, self.place.expert_marks
        self.mark_parameters()

    def reset_parameters(self: Any) -> None:
        """Fill weight and bias as Megatron-core does."""
        self.master_weight = None
        if self.weight is not None:
            dim = self.partitions["weight"].dim
            whole = (self.out_features, self.in_features)
            master = self.place.initialise(self.weight, whole, dim, self._stride, self._init)
            self.master_weight = master if self._keeps_master else None
        self.place.zero(self.bias)

    def get_extra_state(self) -> None:
        """Return None: there is none."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore it."""

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)

    def backward_dw(self) -> None:
        """Do nothing, as there."""


class ColumnParallelLinear(_MegatronLinear, modules.ColumnParallelLinear):
    """Megatron-core's column-parallel layer: its outputs are split over the ranks; called, it returns (output, bias or None).

    Args:
        input_size, output_size: of the whole layer. config: has what Megatron-core's ModelParallelConfig has; an attribute that
            it lacks is at that one's default (`tiled_torch.compat.megatron.config.DEFAULTS`).
        init_method: fills a weight in place. stride: fused weights. keep_master_weight_for_test: `master_weight` is the whole.
        skip_bias_add: return this rank's bias beside the output. skip_weight_param_allocation: each call brings a weight.
        is_expert: see shared_specs.config.ParallelLinearOptions; the group is then that of an expert's layers.
        disable_grad_reduce: leave the input gradient a partial sum. tp_group: None: `parallel_state`'s.
        embedding_activation_buffer, grad_output_buffer, output_dtype, pg_collection: None. tp_comm_buffer_name, name: not used,
            as there.
    Sequence-parallel input is [tokens / R, batch, hidden], with config.sequence_parallel.
    Parameters: weight [out / R, in], bias [out / R]; their marks are Megatron-core's. state_dict has an `_extra_state` of None.
    Numerics, Memory, Raises: as `tiled_torch.parallel.ColumnParallelLinear`.
    Source: named and called as Megatron-core's (core/tensor_parallel/layers.py).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Any = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
    ) -> None:
        kind = type(self).__name__
        buffers = {"embedding_activation_buffer": embedding_activation_buffer, "grad_output_buffer": grad_output_buffer}
        check_unused(kind, **buffers, output_dtype=output_dtype, pg_collection=pg_collection)
        if setting(config, "defer_embedding_wgrad_compute"):
            advice = "tiled_torch.parallel's layer has ParallelLinearOptions(defer_weight_grad=True)."
            fail(kind, "config.defer_embedding_wgrad_compute", "False", True, advice=advice)
        place = Placement.of(kind, config, tp_group, is_expert)
        self._prepare(place, config, init_method, stride, keep_master_weight_for_test)
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            gather_output=gather_output,
            sequence_parallel=place.sequence_parallel and not place.explicit,
            skip_bias_add=skip_bias_add,
            allocate_weight=not skip_weight_param_allocation,
            options=place.options(
                stride=stride, disable_grad_reduce=disable_grad_reduce and not place.sequence_parallel
            ),
            group=place.group,
            **place.like(),
        )
        self._finish(is_expert)
        self.output_size_per_partition = output_size // self.ranks

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, this rank's bias with skip_bias_add, else None).

        Raises:
            RuntimeError: no weight, or one of another shape.
        """
        weight = self.weight if weight is None else weight
        if weight is None or tuple(weight.shape) != self.weight_shape:
            got = "None" if weight is None else show_shape(tuple(weight.shape))
            raise RuntimeError(error_text(type(self).__name__, "weight", show_shape(self.weight_shape), got))
        y = column_parallel_linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            gather_output=self.gather_output if runtime_gather_output is None else runtime_gather_output,
            sequence_parallel=self.sequence_parallel,
            options=self.options,
            group=self.group,
        )
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_MegatronLinear, modules.RowParallelLinear):
    """Megatron-core's row-parallel layer: its inputs are split over the ranks; called, it returns (output, bias or None).

    Args:
        input_is_parallel: x is this rank's stretch of the features. The rest: as `ColumnParallelLinear`.
    With config.sequence_parallel the output is [tokens / R, batch, hidden], and the gradient of the bias is of this rank's
    tokens alone: the bias is marked `sequence_parallel`, by which the caller sums it, as there.
    With is_expert and several ranks the output is this rank's part of a sum, and skip_bias_add has to be True.
    Parameters: weight [out, in / R], bias [out]. The rest: as `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        kind = type(self).__name__
        check_unused(kind, pg_collection=pg_collection)
        place = Placement.of(kind, config, tp_group, is_expert)
        self._prepare(place, config, init_method, stride, keep_master_weight_for_test)
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=input_is_parallel,
            sequence_parallel=place.sequence_parallel and not place.explicit,
            skip_bias_add=skip_bias_add,
            options=place.options(stride=stride),
            group=place.group,
            **place.like(),
        )
        self._finish(is_expert)
        self.input_size_per_partition = input_size // self.ranks

    def mark_parameters(self) -> None:
        """Mark parameters as there: the bias also with `sequence_parallel`."""
        super().mark_parameters()
        bias: Any = self._parameters.get("bias")
        if bias is not None:
            bias.sequence_parallel = bool(setting(self.config, "sequence_parallel"))

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return (output, the bias with skip_bias_add, else None)."""
        assert self.weight is not None
        y = row_parallel_linear(
            input_,
            self.weight,
            input_is_parallel=self.input_is_parallel,
            sequence_parallel=self.sequence_parallel,
            options=self.options,
            group=self.group,
        )
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


class VocabParallelEmbedding(modules.VocabParallelEmbedding):
    """Megatron-core's embedding, whose vocabulary is split over the ranks.

    Args:
        num_embeddings: a multiple of the number of ranks. init_method, config, tp_group: as `ColumnParallelLinear`.
        reduce_scatter_embeddings: of ids [batch, tokens] return [tokens / R, batch, hidden]. pg_collection: None.
    Parameters: weight [V / R, hidden].
    Numerics, Memory, Raises: as `tiled_torch.parallel.VocabParallelEmbedding`.
    Source: named and called as Megatron-core's (core/tensor_parallel/layers.py).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Init,
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: Any = None,
        pg_collection: Any = None,
    ) -> None:
        kind = type(self).__name__
        check_unused(kind, pg_collection=pg_collection)
        self.place, self.config = Placement.of(kind, config, tp_group, False), config
        over = rank_group(kind, self.place.group)
        span = VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, over.rank, over.size)
        self.vocab_start_index, self.vocab_end_index = span
        self.num_embeddings_per_partition = span[1] - span[0]
        self.deterministic_mode = bool(setting(config, "deterministic_mode"))
        super().__init__(
            num_embeddings,
            embedding_dim,
            reduce_scatter_embeddings=reduce_scatter_embeddings,
            deterministic=self.deterministic_mode,
            init_method=init_method,
            group=self.place.group,
            **self.place.like(),
        )

    def reset_parameters(self) -> None:
        """Fill the weight as Megatron-core does."""
        assert self.init_method is not None
        self.place.initialise(self.weight, (self.num_embeddings, self.embedding_dim), 0, 1, self.init_method)

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        """Return [*tokens, hidden], or [tokens / R, batch, hidden] with reduce_scatter_embeddings."""
        ids = input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_
        return vocab_parallel_embedding(
            ids,
            self.weight,
            vocab_size=self.num_embeddings,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            deterministic=self.deterministic,
            group=self.group,
        )

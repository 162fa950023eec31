"""Megatron-core's functional linear layers of this rank's weights, over `column_parallel_linear`."""

from typing import Any

import torch
from torch import Tensor

from shared_specs.config import ParallelLinearOptions
from shared_specs.core import checks
from shared_specs.errors import fail
from tiled_torch.compat.megatron.config import check_unused
from tiled_torch.compat.megatron.parallel_state import group_or_default
from tiled_torch.layers.linear import column_parallel_linear


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Any = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return input weight^T + bias for this rank's stretch of the outputs.

    Args:
        input: [..., in], with sequence_parallel this rank's [tokens / R, ..., in]. weight: [out / R, in]. bias: [out / R].
        gradient_accumulation_fusion: add the weight gradient to `weight.main_grad`, float32 or of 16 bits.
        allreduce_dgrad: sum the input gradient over the ranks; False leaves it a partial sum.
        sequence_parallel: gather the tokens; the input gradient is reduced and scattered.
        grad_output_buffer: None. wgrad_deferral_limit: not used without one. gtp_remat_size: 1.
        tp_group: None: `parallel_state`'s. output_dtype: None, or the dtype of input.
    Numerics, Memory: as `tiled_torch.parallel.column_parallel_linear`.
    Raises:
        SpecError: both allreduce_dgrad and sequence_parallel; an argument that nothing here would follow. The rest: as
            `column_parallel_linear`.
    Source: named and called as Megatron-core's (core/tensor_parallel/layers.py).
    """
    name = "linear_with_grad_accumulation_and_async_allreduce"
    check_unused(name, grad_output_buffer=grad_output_buffer)
    _check(name, input, gtp_remat_size, output_dtype, allreduce_dgrad, sequence_parallel)
    options = ParallelLinearOptions(
        disable_grad_reduce=not (allreduce_dgrad or sequence_parallel),
        gradient_accumulation_fusion=gradient_accumulation_fusion,
    )
    group = group_or_default(tp_group)
    return column_parallel_linear(
        input, weight, bias, sequence_parallel=sequence_parallel, options=options, group=group
    )


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return as `linear_with_grad_accumulation_and_async_allreduce`, of a weight and a bias that get no gradient.

    gradient_accumulation_fusion is not used, as there.
    """
    name = "linear_with_frozen_weight"
    check_unused(name, grad_output_buffer=grad_output_buffer, wgrad_deferral_limit=wgrad_deferral_limit)
    checks.check_flags(name, gradient_accumulation_fusion=gradient_accumulation_fusion)
    frozen = weight.detach(), None if bias is None else bias.detach()
    return linear_with_grad_accumulation_and_async_allreduce(
        input, *frozen, False, allreduce_dgrad, sequence_parallel, None, 0, tp_group, gtp_remat_size, output_dtype
    )


def _check(
    name: str, x: Tensor, gtp_remat_size: int, output_dtype: torch.dtype | None, reduce: bool, sequence: bool
) -> None:
    checks.check_flags(name, allreduce_dgrad=reduce, sequence_parallel=sequence)
    if reduce and sequence:
        fail(name, "allreduce_dgrad", "False with sequence_parallel", True)
    if gtp_remat_size != 1:
        fail(name, "gtp_remat_size", "1", gtp_remat_size, advice="fully_shard is what shards weights here.")
    if output_dtype not in (None, x.dtype):
        advice = "Cast the result."
        fail(name, "output_dtype", f"None or {x.dtype}", output_dtype, advice=advice)

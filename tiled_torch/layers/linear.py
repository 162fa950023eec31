"""Linear layers that are split over ranks, as functions of this rank's weights: by columns, by rows, with a frozen weight.

Letters: R ranks, T tokens. Weights are torch's [out, in].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared_specs.collectives import checks as collective_checks
from shared_specs.config import TORCH, ParallelLinearOptions
from shared_specs.errors import fail, fail_type, fail_with
from shared_specs.layers import checks as layer_checks
from tiled_torch.collectives.conjugates import Join, Keep, Split, Sum, SumSplit, move
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.autocast import after_autocast, autocast_dtype, operand
from tiled_torch.core.gradients import main_grad_of
from tiled_torch.core.tensors import refuse_dtensor, wide_dtype
from tiled_torch.layers.linear_autodiff import LinearCall, ParallelProduct

DEFAULTS = ParallelLinearOptions()


@not_compiled
def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gather_output: bool = False,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    options: ParallelLinearOptions = DEFAULTS,
    group: Any = None,
) -> Tensor:
    """Return y = x weight^T + bias for this rank's slice of the outputs; the gradient of x is summed over the ranks.

    Args:
        x: [..., in], the same on every rank; with sequence_parallel this rank's tokens. They are gathered here, and their
            gradient is reduced and scattered.
        weight: [out / R, in], this rank's rows. With options.stride = s: the rank's parts of s fused weights, one after the
            other. bias: [out / R] or None.
        gather_output: return all outputs on every rank, in the order of the whole weight.
        split_sizes: the number of tokens of every rank along options.sequence_dim, with sequence_parallel; None if all have
            the same number.
        options: see shared_specs.config.ParallelLinearOptions.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [..., out / R], or [..., out] with gather_output; always with the tokens of all ranks.
    Numerics: products in the dtype of x (after autocast); the bias gradient is summed in float32; each rank's part of the
        input gradient is rounded to its dtype; the parts are summed over the ranks in float32 and rounded once. With
        options.gradient_accumulation_fusion the weight gradient is computed in float32 (float64 for float64) and added to
        `weight.main_grad`. A 16-bit main_grad is rounded once in each backward (once for all the calls of a
        `deferred_weight_grad`), so its error grows with the number of micro-batches. Keep it float32 if there are many.
    Memory: keeps the weight and, if the weight needs a gradient, x as passed (this rank's tokens).
    Raises:
        SpecError, TypeError: shapes, dtypes or options do not fit; raised before any communication.
        UnsupportedError: no process group; a backward with create_graph=True.
    Source: Megatron-LM, arXiv 1909.08053 section 3 and 2205.05198 section 4.2.
    """
    call = LinearArguments(
        "column_parallel_linear", "column", x, weight, bias, sequence_parallel, split_sizes, options, group
    )
    return call.column(gather_output)


@not_compiled
def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    input_is_parallel: bool = False,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    options: ParallelLinearOptions = DEFAULTS,
    group: Any = None,
) -> Tensor:
    """Return y = sum over ranks of x weight^T, plus bias, where each rank has a slice of the inputs.

    Args:
        x: [..., in / R] with input_is_parallel. Otherwise [..., in], the same on every rank; each rank takes its slice.
        weight: [out, in / R], this rank's columns (options.stride as in `column_parallel_linear`). bias: [out], the same
            on every rank, added once.
        input_is_parallel: x is split as a column-parallel layer returns it.
        sequence_parallel: return only this rank's tokens of the sum (reduce-scatter); x has all tokens. The gradient of the
            bias is then summed over the ranks here.
        split_sizes, options, group: as in `column_parallel_linear`; options.disable_grad_reduce is refused.
    Returns:
        [..., out], the same on every rank, or this rank's tokens of it, or with options.explicit_expert_comm this rank's part
        of the sum.
    Numerics: partial results are rounded to the dtype of x, summed over the ranks in float32 and rounded once, then rounded
        again with the bias. The error is within the limit of one process at any number of ranks.
    Memory, Raises, Source: as `column_parallel_linear`.
    """
    call = LinearArguments(
        "row_parallel_linear", "row", x, weight, bias, sequence_parallel, split_sizes, options, group
    )
    layer_checks.check_explicit_bias("row_parallel_linear", call.options, added=bias is not None)
    y = call.row(input_is_parallel)
    if bias is None:
        return y
    return y + (row_bias(bias, call.over) if sequence_parallel else bias).to(y.dtype)


@not_compiled
def linear_with_frozen_weight(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    options: ParallelLinearOptions = DEFAULTS,
    group: Any = None,
) -> Tensor:
    """`column_parallel_linear` whose weight needs no gradient: x is not kept for backward.

    Args:
        weight: [out / R, in], with requires_grad off. The rest: as in `column_parallel_linear`.
    Returns:
        [..., out / R].
    Memory: keeps only the weight.
    Raises:
        As `column_parallel_linear`; SpecError where the weight needs a gradient, or an option concerns that gradient.
    """
    name = "linear_with_frozen_weight"
    if isinstance(weight, Tensor) and weight.requires_grad:
        advice = "column_parallel_linear computes the weight's gradient."
        fail_with(name, "weight needs a gradient", advice=advice)
    call = LinearArguments(name, "column", x, weight, bias, sequence_parallel, split_sizes, options, group)
    for option in ("gradient_accumulation_fusion", "defer_weight_grad"):
        if getattr(options, option):
            fail(name, f"options.{option}", "False", True, advice="A frozen weight has no gradient.")
    return call.column(False)


class LinearArguments:
    """One checked call; nothing has been sent when it exists."""

    def __init__(
        self,
        function: str,
        kind: str,
        x: Any,
        weight: Any,
        bias: Any,
        sequence_parallel: bool,
        split_sizes: Any,
        options: Any,
        group: Any,
    ) -> None:
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
            if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
                fail_type(function, name, "an array", type(tensor).__name__)
            refuse_dtensor(function, name, tensor, "Pass this rank's part: to_local().")
        layer_checks.check_flags(function, sequence_parallel=sequence_parallel)
        self.options = layer_checks.check_linear_options(
            function, options, kind=kind, sequence_parallel=sequence_parallel, group_given=group is not None
        )
        self.over = rank_group(function, group)
        self.x, self.weight, self.bias, self.sequence = x, weight, bias, sequence_parallel
        self.cast = autocast_dtype(x)
        self.dim, self.sizes = self._sequence_dim(split_sizes, given_whole=kind == "row")

    def check_column(self, gather_output: bool) -> None:
        """Check the call of a column-parallel layer.

        Raises:
            SpecError: a shape, size or option disagrees.
            TypeError: a flag is neither True nor False.
        """
        function, options = self.over.function, self.options
        layer_checks.check_flags(function, gather_output=gather_output)
        if options.explicit_expert_comm:
            layer_checks.check_explicit(function, gather_output=(gather_output, False))
        self._check(self.x.shape[-1] if self.x.dim() else 0)
        if self.bias is not None:
            layer_checks.check_bias(function, operand(self.bias, self.cast), self.weight.shape[0])
        layer_checks.check_split(function, "weight's rows", self.weight.shape[0], 1, options.stride)

    def column(self, gather_output: bool) -> Tensor:
        self.check_column(gather_output)
        over, options = self.over, self.options
        reduced = over.several and not (options.disable_grad_reduce or options.explicit_expert_comm)
        call = self._static(gathered=self.dim if over.several else None, reduced=reduced)
        y = ParallelProduct.apply(self.x, self.weight, self.bias, call)
        if not gather_output:
            return y
        last = y.dim() - 1
        return in_order(move(y, over, Join(last), Split(last)), over.size, options.stride)

    def check_row(self, input_is_parallel: bool) -> None:
        """Check the call of a row-parallel layer.

        Raises:
            SpecError: a shape, size or option disagrees.
            TypeError: a flag is neither True nor False.
        """
        function, options = self.over.function, self.options
        layer_checks.check_flags(function, input_is_parallel=input_is_parallel)
        if options.explicit_expert_comm:
            layer_checks.check_explicit(function, input_is_parallel=(input_is_parallel, True))
        if self.sequence and not input_is_parallel:
            advice = "The gradient of a whole x would be gathered twice."
            fail(function, "input_is_parallel", "True with sequence_parallel", False, advice=advice)
        inputs = self.x.shape[-1] if self.x.dim() else 0
        if not input_is_parallel:
            layer_checks.check_split(function, "x's last dim", inputs, self.over.size, options.stride)
            inputs //= self.over.size
        self._check(inputs)
        if self.bias is not None:
            layer_checks.check_bias(function, operand(self.bias, self.cast), self.weight.shape[0])

    def row(self, input_is_parallel: bool) -> Tensor:
        """Without the bias."""
        self.check_row(input_is_parallel)
        over, x = self.over, self.x
        if not input_is_parallel:
            last = x.dim() - 1
            x = move(by_rank(x, over.size, self.options.stride), over, Split(last), Join(last))
        y = ParallelProduct.apply(x, self.weight, None, self._static())
        if self.options.explicit_expert_comm:
            return y
        if self.dim is None:
            return move(y, over, Sum(), Keep())
        return move(y, over, SumSplit(self.dim, self.sizes), Join(self.dim, self.sizes))

    def _static(self, *, gathered: int | None = None, reduced: bool = False) -> LinearCall:
        options, weight = self.options, self.weight
        wanted = weight.requires_grad and torch.is_grad_enabled()
        fused, deferred = (
            wanted and flag for flag in (options.gradient_accumulation_fusion, options.defer_weight_grad)
        )
        if deferred and not weight.is_leaf:
            advice = "Its gradient could not go on from there once backward is over."
            wrong = "weight is a result, and options.defer_weight_grad takes a leaf"
            fail_with(self.over.function, wrong, advice=advice)
        return LinearCall(
            self.over,
            after_autocast(self.x, self.cast),
            gathered,
            self.sizes,
            reduced,
            options.async_grad_reduce,
            self._main_grad() if fused else None,
            weight if fused or deferred else None,
            deferred,
            options.wgrad_deferral_limit,
        )

    def _main_grad(self) -> Tensor:
        main_grad, weight = main_grad_of(self.weight), self.weight
        dtypes = (wide_dtype(weight.dtype), torch.bfloat16, torch.float16)
        names = " or ".join(str(dtype) for dtype in dtypes)
        wanted = f"a {names} tensor {list(weight.shape)} with options.gradient_accumulation_fusion"
        if not isinstance(main_grad, Tensor):
            fail(self.over.function, "weight.main_grad", wanted, type(main_grad).__name__)
        if main_grad.dtype not in dtypes or main_grad.shape != weight.shape:
            fail(self.over.function, "weight.main_grad", wanted, f"{main_grad.dtype} {list(main_grad.shape)}")
        return main_grad

    def _check(self, inputs: int) -> None:
        bias = None if self.bias is None else operand(self.bias, self.cast)
        x, weight = operand(self.x, self.cast), operand(self.weight, self.cast)
        layer_checks.check_parallel_linear(
            self.over.function, x=x, weight=weight, bias=bias, inputs=inputs, names=TORCH
        )

    def _sequence_dim(self, sizes: Any, *, given_whole: bool) -> tuple[int | None, tuple[int, ...] | None]:
        function, shape = self.over.function, tuple(self.x.shape)
        if not self.sequence:
            if sizes is not None:
                advice = "It says how many tokens each rank holds."
                fail(function, "split_sizes", "left out without sequence_parallel", sizes, advice=advice)
            return None, None
        dim, sizes = layer_checks.check_sequence_dim(function, self.options.sequence_dim, sizes, shape, self.over.size)
        if not given_whole:
            if sizes is not None:
                collective_checks.check_part(function, "split_sizes", sizes, shape, dim, self.over.rank)
        elif sizes is None:
            collective_checks.check_even(function, shape, dim, self.over.size)
        else:
            collective_checks.check_total(function, "split_sizes", sizes, shape, dim)
        return dim, sizes


@not_compiled
def row_bias(bias: Tensor, over: RankGroup) -> Tensor:
    """Return the bias that is added to this rank's tokens; its gradient is summed over the ranks, which have the others."""
    return move(bias, over, Keep(), Sum())


@not_compiled
def gathered_bias(bias: Tensor, over: RankGroup, stride: int) -> Tensor:
    """Return the bias of all outputs, which every rank goes on with alike."""
    return in_order(move(bias, over, Join(0), Split(0)), over.size, stride)


def in_order(y: Tensor, ranks: int, stride: int) -> Tensor:
    """Features that lie rank by rank, each rank's part of every fused weight, in the order of the whole fused weight."""
    if stride == 1 or ranks == 1:
        return y
    return y.unflatten(-1, (ranks, stride, -1)).transpose(-3, -2).flatten(-3)


def by_rank(x: Tensor, ranks: int, stride: int) -> Tensor:
    """Return the inverse of `in_order`."""
    if stride == 1 or ranks == 1:
        return x
    return x.unflatten(-1, (stride, ranks, -1)).transpose(-3, -2).flatten(-3)

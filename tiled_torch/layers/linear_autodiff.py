"""The product of a layer that is split over ranks, with its hand-ordered backward. The only autograd code of the layers.

Backward has three pieces of work that do not wait for each other: the input gradient's product, its reduction over the
ranks, and the weight gradient's product. The reduction travels while the weight gradient is computed (Megatron-LM, arXiv
1909.08053 and 2205.05198); under sequence parallelism x is gathered again, which travels under the first product.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.collectives.transport import Pending
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.gradients import GradientSum, returned_gradient
from tiled_torch.core.tensors import refuse_dtensor, refuse_second_order, rows_of

_KEPT = "_deferred_weight_grads"  # on a weight: what its gradient will be computed from


@dataclass(frozen=True)
class LinearCall:
    """The static part of one call.

    Args:
        dtype: of the product, x's after autocast.
        gathered: the dim of x along which it holds this rank's tokens only; None: x is whole. sizes: of every rank there.
        reduced: the input gradient is a partial sum, to be added over the ranks; with `gathered` it is scattered as well.
        asynchronous: reduce it while the weight gradient is computed.
        main_grad: where the weight gradient is added, or None. owner: the weight, where it is marked or keeps work.
        deferred: keep x and dy with the owner instead of computing its gradient. limit: of so many calls at most; 0: of all.
    """

    over: RankGroup
    dtype: torch.dtype
    gathered: int | None = None
    sizes: tuple[int, ...] | None = None
    reduced: bool = False
    asynchronous: bool = True
    main_grad: Tensor | None = None
    owner: Tensor | None = None
    deferred: bool = False
    limit: int = 0

    def whole(self, x: Tensor) -> Pending:
        """Return x with the tokens of all ranks, on its way."""
        x = x.to(self.dtype)
        return Pending(self.over, "", None, lambda: x) if self.gathered is None else self._gather(x, self.gathered)

    def _gather(self, x: Tensor, dim: int) -> Pending:
        return transport.all_gather(self.over, x, dim, self.sizes)

    def reduce(self, dx: Tensor) -> Pending:
        """Return the input gradient, on its way."""
        if not self.reduced:
            return Pending(self.over, "", None, lambda: dx)
        if self.gathered is None:
            return transport.all_reduce_(self.over, dx.contiguous())
        return transport.reduce_scatter(self.over, dx, self.gathered, self.sizes)

    def keeps(self) -> bool:
        """Return whether the gradient of the weight is left for later: not where as many calls wait as may."""
        waiting = len(self.owner.__dict__.get(_KEPT, ())) if self.deferred and self.owner is not None else 0
        return self.deferred and (self.limit == 0 or waiting < self.limit)

    def weight_gradient(self, weight: Tensor, *, single: bool = True) -> GradientSum:
        """Return the sum of dy.T @ x over `single` or several calls, empty."""
        return GradientSum(weight, self.main_grad, single=single)


class ParallelProduct(torch.autograd.Function):
    """y = whole(x) @ weight.T + bias."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        with without_autocast(x):
            total = call.whole(x).wait()
            return _product(total, weight.to(call.dtype), None if bias is None else bias.to(call.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.call = inputs
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        # x (this rank's tokens only): an operand of the weight gradient; weight: an operand of the input gradient
        ctx.save_for_backward(x if weight.requires_grad else None, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        refuse_second_order(call.over.function)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with without_autocast(dy):
            now = needs_weight and not call.keeps()
            gathering = call.whole(x) if now else None
            if gathering is not None and not call.asynchronous:
                gathering = _arrived(call, gathering)
            reducing = call.reduce(dy @ weight.to(call.dtype)) if needs_x else None
            if reducing is not None and not call.asynchronous:
                reducing = _arrived(call, reducing)
            dweight = None
            if gathering is not None:
                total = call.weight_gradient(weight)
                total.add_product(rows_of(dy), rows_of(gathering.wait()))
                dweight = total.result()
                if call.main_grad is not None:
                    dweight = returned_gradient(call.owner, None)  # type: ignore[arg-type]
            elif needs_weight:
                kept = replace(call, owner=None)  # what a weight keeps holds on to neither it nor to x's graph
                call.owner.__dict__.setdefault(_KEPT, []).append((x.detach(), dy, kept))  # type: ignore[union-attr]
            dbias = rows_of(dy).sum(0, dtype=_sum_dtype(dy)).to(ctx.bias_dtype) if needs_bias else None
            dx = None if reducing is None else reducing.wait().to(ctx.x_dtype)
        return dx, dweight, dbias, None


def deferred_weight_grad(weight: Tensor) -> int:
    """Compute the gradient that backward left out (`ParallelLinearOptions.defer_weight_grad`); return the number of calls.

    It is added to `weight.grad`, or to `weight.main_grad` with gradient_accumulation_fusion. No autograd hook sees it.
    Under sequence parallelism x is gathered again, so every rank of the group must make this call. (In Megatron-LM the caller
    owns two lists, `embedding_activation_buffer` and `grad_output_buffer`, and drains them. Here the weight owns the pairs, so
    a layer takes no lists.)

    Args:
        weight: a layer's weight, or the shared one that was passed to it.
    Numerics: the sum over calls is computed in float32 (float64 for float64) and rounded once.
    Memory: each call keeps its x (this rank's tokens) and dy until this function frees them, one by one.
    Raises:
        UnsupportedError: a DTensor. After backward, fully_shard frees the tensor that it gathered for a call, and the kept
            pairs with it.
    """
    refuse_dtensor("deferred_weight_grad", "weight", weight, "Leave out options.defer_weight_grad under fully_shard.")
    kept = weight.__dict__.pop(_KEPT, [])  # type: ignore[attr-defined]
    if not kept:
        return 0
    count = len(kept)
    with torch.no_grad(), without_autocast(weight):
        total = kept[0][2].weight_gradient(weight, single=count == 1)
        while kept:
            x, dy, call = kept.pop(0)
            total.add_product(rows_of(dy), rows_of(call.whole(x).wait()))
        gradient = total.result()
        if gradient is None:  # it is in main_grad
            returned_gradient(weight, None)
        elif weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient
    return count


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias as F.linear makes it, but never a view: fully_shard's hook on a result would go lost in place."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if bias is None:
        torch.mm(rows_of(x), weight.T, out=rows_of(y))
    else:
        torch.addmm(bias, rows_of(x), weight.T, out=rows_of(y))
    return y


def _arrived(call: LinearCall, pending: Pending) -> Pending:
    result = pending.wait()
    return Pending(call.over, "", None, lambda: result)


def _sum_dtype(dy: Tensor) -> torch.dtype:
    return torch.float64 if dy.dtype == torch.float64 else torch.float32

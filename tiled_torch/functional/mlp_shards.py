"""The two loops of the tiled MLP: forward and backward over the shards of one plan. No autograd here.

Letters: T tokens, H hidden, I intermediate, t tokens of a shard. x: [T, H]; w_gate, w_up: [I, H]; w_down: [H_out, I].
Nothing of shape [T, I] is ever allocated: the buffers are [t, I] and every shard reuses them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.shards import ShardPlan
from tiled_torch.functional.accumulate import GradientSum, main_grad_of
from tiled_torch.functional.activations import combine_, combine_backward


class Weights(NamedTuple):
    """Operands of one MLP besides x. w_gate None: a plain two-matrix MLP."""

    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None

    def cast(self, dtype: torch.dtype) -> "Weights":
        return Weights(*(None if w is None else w.to(dtype) for w in self))


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x @ w.T + bias into out."""
    return torch.mm(x, w.T, out=out) if bias is None else torch.addmm(bias, x, w.T, out=out)


def _buffers(count: int, plan: ShardPlan, like: Tensor, width: int) -> list[Tensor]:
    return [torch.empty((plan.longest, width), dtype=like.dtype, device=like.device) for _ in range(count)]


def up_projections(x: Tensor, w: Weights, gate: Tensor | None, up: Tensor) -> None:
    """gate = x @ w_gate.T and up = x @ w_up.T, written into the buffers given."""
    if w.w_gate is not None and gate is not None:
        _linear(x, w.w_gate, w.b_gate, gate)
    _linear(x, w.w_up, w.b_up, up)


def kept_up_projections(
    x: Tensor, w: Weights, plan: ShardPlan, kept_start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """gate and up of the tokens from `kept_start` on, each [kept tokens, I] (gate [0, I] without a gate)."""
    w, width = w.cast(dtype), w.w_up.shape[0]
    up = torch.empty((plan.tokens - kept_start, width), dtype=dtype, device=x.device)
    gate = torch.empty_like(up if w.w_gate is not None else up[:0])
    for start, stop in plan.spans:
        if start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            up_projections(x[start:stop].to(dtype), w, gate[rows], up[rows])
    return gate, up


def mlp_forward(
    x: Tensor, w: Weights, kept: tuple[Tensor, Tensor] | None, activation: str, plan: ShardPlan, y: Tensor
) -> None:
    """Writes y [T, H_out], whose dtype is the compute dtype; `kept` holds gate and up of the last tokens."""
    w, gated = w.cast(y.dtype), w.w_gate is not None
    kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
    buffers = _buffers(2 if gated else 1, plan, y, w.w_up.shape[0])
    for start, stop in plan.spans:
        scratch = [buffer[: stop - start] for buffer in buffers]
        gate, up, h = (scratch[0] if gated else None), scratch[-1], scratch[0]
        if kept and start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            gate, up = (kept[0][rows] if gated else None), kept[1][rows]
        else:
            up_projections(x[start:stop].to(y.dtype), w, gate, up)
        _linear(combine_(activation, gate, up, h), w.w_down, w.b_down, y[start:stop])


def mlp_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    kept: tuple[Tensor, Tensor] | None,
    activation: str,
    plan: ShardPlan,
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None = None,
) -> list[Tensor | None]:
    """Gradients of x and of every operand of `weights`, in that order; None where `needs` says so or main_grad took it.

    gate and up are recomputed shard by shard (kept ones are read), the down-projection never. Three buffers [t, I]
    suffice (two without a gate): dgate, h and dup are written over gate, up and dh.
    """
    dtype, gated, single = dy.dtype, weights.w_gate is not None, len(plan) <= 1
    w = weights.cast(dtype)
    needs_dx, *needs_dw = needs
    mains = main_grads or [main_grad_of(p) for p in weights]
    sums = [
        GradientSum(p, main, single=single and p.dtype == dtype) if p is not None and need else None
        for p, need, main in zip(weights, needs_dw, mains, strict=True)
    ]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
    kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
    buffers = _buffers(3 if gated else 2, plan, dy, w.w_up.shape[0])
    for start, stop in plan.spans:
        *outs, dh = (buffer[: stop - start] for buffer in buffers)
        gate, up = (outs[0] if gated else None), outs[-1]
        x_shard, dy_shard = x[start:stop].to(dtype), dy[start:stop]
        if kept and start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            gate, up = (kept[0][rows] if gated else None), kept[1][rows]
        else:
            up_projections(x_shard, w, gate, up)
        torch.mm(dy_shard, w.w_down, out=dh)
        combine_backward(activation, gate, up, dh, (*outs, dh))
        dgate, h, dup = (outs[0] if gated else None), outs[-1], dh
        if dx is not None:
            _write_dx(dx[start:stop], dgate, dup, w)
        _add_weight_gradients(sums, x_shard, dy_shard, dgate, dup, h)
    return [dx, *(None if total is None else total.result() for total in sums)]


def _write_dx(dx: Tensor, dgate: Tensor | None, dup: Tensor, w: Weights) -> None:
    rows = dx if dx.dtype == dup.dtype else torch.empty_like(dx, dtype=dup.dtype)
    torch.mm(dup, w.w_up, out=rows)
    if dgate is not None and w.w_gate is not None:
        rows.addmm_(dgate, w.w_gate)
    if rows is not dx:
        dx.copy_(rows)


def _add_weight_gradients(
    sums: Sequence[GradientSum | None], x: Tensor, dy: Tensor, dgate: Tensor | None, dup: Tensor, h: Tensor
) -> None:
    w_gate, w_up, w_down, b_gate, b_up, b_down = sums
    for total, rows, columns in ((w_gate, dgate, x), (w_up, dup, x), (w_down, dy, h)):
        if total is not None and rows is not None:
            total.add_product(rows, columns)
    for total, rows in ((b_gate, dgate), (b_up, dup), (b_down, dy)):
        if total is not None and rows is not None:
            total.add_rows(rows)

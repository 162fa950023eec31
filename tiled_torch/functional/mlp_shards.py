"""The two loops of the tiled MLP: forward and backward over the shards of one plan. No autograd here.

What a shard computes is in `steps.py` (PyTorch operations; on some CPUs `onednn_steps.py`) and `kernel_steps.py` (Triton).
Letters: T tokens, H hidden, I intermediate, t tokens of a shard. x: [T, H]; w_gate, w_up: [I, H]; w_down: [H_out, I].
Nothing of shape [T, I] is ever allocated: the buffers are [t, I] and every shard reuses them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_specs.shards import ShardPlan
from tiled_torch.functional import onednn_steps
from tiled_torch.functional.accumulate import GradientSum, main_grad_of
from tiled_torch.functional.steps import EAGER, Steps, Weights


def steps_named(name: str, x: Tensor, weights: Weights, dtype: torch.dtype) -> Steps:
    """The steps of one call: "eager", "triton" or "deterministic" (Triton, with no product of the vendor's)."""
    if name == "eager":
        return EAGER
    from tiled_torch.functional.kernel_steps import steps_for  # imports triton

    return steps_for(x, weights, dtype, deterministic=name == "deterministic")


def kept_up_projections(
    x: Tensor, w: Weights, plan: ShardPlan, kept_start: int, dtype: torch.dtype, steps: Steps = EAGER
) -> tuple[Tensor, Tensor]:
    """gate and up of the tokens from `kept_start` on, each [kept tokens, I] (gate [0, I] without a gate)."""
    w, width = w.cast(dtype), w.w_up.shape[0]
    whole = onednn_steps.steps_for(steps, x, w, plan, dtype)
    if kept_start < plan.tokens and x.dtype == dtype and isinstance(whole, onednn_steps.OneDNNSteps):
        return onednn_steps.up_projections_of_rows(x[kept_start:], w)
    up = torch.empty((plan.tokens - kept_start, width), dtype=dtype, device=x.device)
    gate = torch.empty_like(up if w.w_gate is not None else up[:0])
    for start, stop in plan.spans:
        if start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            steps.up_projections(x[start:stop].to(dtype), w, gate[rows] if w.w_gate is not None else None, up[rows])
    return gate, up


def mlp_forward(
    x: Tensor,
    w: Weights,
    kept: tuple[Tensor, Tensor] | None,
    activation: str,
    plan: ShardPlan,
    y: Tensor,
    steps: Steps = EAGER,
) -> None:
    """Writes y [T, H_out], whose dtype is the compute dtype; `kept` holds gate and up of the last tokens."""
    w, gated = w.cast(y.dtype), w.w_gate is not None
    kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
    steps = onednn_steps.steps_for(steps, x, w, plan, y.dtype)
    buffers = steps.buffers(2 if gated else 1, plan.longest, y, w.w_up.shape[0])
    for start, stop in plan.spans:
        scratch = steps.scratch(buffers, stop - start)
        if kept and start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            h = steps.combine(activation, kept[0][rows] if gated else None, kept[1][rows], scratch[0])
        else:
            h = steps.hidden(activation, x[start:stop].to(y.dtype), w, scratch)
        steps.linear(h, w.w_down, w.b_down, y[start:stop])


def mlp_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    kept: tuple[Tensor, Tensor] | None,
    activation: str,
    plan: ShardPlan,
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None = None,
    steps: Steps = EAGER,
) -> list[Tensor | None]:
    """Gradients of x and of every operand of `weights`, in that order; None where `needs` says so or main_grad took it.

    gate and up are recomputed shard by shard (kept ones are read), the down-projection never. Three buffers [t, I]
    suffice (two without a gate): dgate, h and dup are written over gate, up and dh, or over whichever of them the
    steps choose.
    """
    dtype, gated, single = dy.dtype, weights.w_gate is not None, len(plan) <= 1
    w = weights.cast(dtype)
    needs_dx, *needs_dw = needs
    sums = gradient_sums(weights, needs_dw, main_grads, single=single, dtype=dtype, steps=steps)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
    kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
    steps = onednn_steps.steps_for(steps, x, w, plan, dtype)
    buffers = steps.buffers(3 if gated else 2, plan.longest, dy, w.w_up.shape[0])
    for start, stop in plan.spans:
        scratch = steps.scratch(buffers, stop - start)
        gate, up = (scratch[0] if gated else None), scratch[-2]
        x_shard, dy_shard = x[start:stop].to(dtype), dy[start:stop]
        if kept and start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            gate, up = (kept[0][rows] if gated else None), kept[1][rows]
        else:
            steps.up_projections(x_shard, w, gate, up)
        dgate, h, dup = steps.hidden_gradients(activation, dy_shard, w, gate, up, scratch)
        add_down_gradients(sums, dy_shard, h)
        if dx is not None:
            steps.dx(dgate, dup, w, dx[start:stop])
        add_up_gradients(sums, x_shard, dgate, dup)
    return [dx, *(None if total is None else total.result() for total in sums)]


def gradient_sums(
    weights: Weights,
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None,
    *,
    single: bool,
    dtype: torch.dtype,
    steps: Steps,
) -> list[GradientSum | None]:
    """Where the gradient of every operand of `weights` is summed; None where nobody needs it."""
    mains = main_grads or [main_grad_of(p) for p in weights]
    return [
        GradientSum(p, main, single=single and p.dtype == dtype, steps=steps) if p is not None and need else None
        for p, need, main in zip(weights, needs, mains, strict=True)
    ]


def add_down_gradients(sums: Sequence[GradientSum | None], dy: Tensor, h: Tensor) -> None:
    """One shard's part of the sums of w_down and b_down. Nothing of the shard needs dy or h afterwards."""
    _, _, w_down, _, _, b_down = sums
    if w_down is not None:
        w_down.add_product(dy, h)
    if b_down is not None:
        b_down.add_rows(dy)


def add_up_gradients(sums: Sequence[GradientSum | None], x: Tensor, dgate: Tensor | None, dup: Tensor) -> None:
    """One shard's part of the sums of gate and up."""
    w_gate, w_up, _, b_gate, b_up, _ = sums
    for total, rows in ((w_gate, dgate), (w_up, dup)):
        if total is not None and rows is not None:
            total.add_product(rows, x)
    for total, rows in ((b_gate, dgate), (b_up, dup)):
        if total is not None and rows is not None:
            total.add_rows(rows)

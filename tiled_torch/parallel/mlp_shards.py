"""The loops of the MLP whose weights and tokens are split over ranks, one gathered shard at a time. No autograd here.

As `functional/mlp_shards.py`, with this rank's columns of gate and up and rows of down: y and dx of a shard are partial
sums, which are reduced and scattered while the next shard computes. Letters: R ranks, t local tokens of a shard, I / R the
rank's part of the intermediate size. x: [T / R, H]; w_gate, w_up: [I / R, H]; w_down: [H_out, I / R].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_specs.partitions import SequencePlan
from tiled_torch.functional.mlp_shards import add_weight_gradients, buffers_of, gradient_sums
from tiled_torch.functional.steps import EAGER, Steps, Weights
from tiled_torch.parallel.groups import RankGroup
from tiled_torch.parallel.sequence import Scattered, gathered, gathered_once

Kept = tuple[Tensor, Tensor] | None  # gate and up of the last gathered shards, padding included


def kept_up_projections(
    over: RankGroup,
    plan: SequencePlan,
    x: Tensor,
    w: Weights,
    kept_start: int,
    dtype: torch.dtype,
    steps: Steps = EAGER,
) -> tuple[Tensor, Tensor]:
    """gate and up of the gathered rows from `kept_start` on, each [kept rows, I / R] (gate [0, I / R] without a gate)."""
    w, spans = w.cast(dtype), plan.spans
    up = x.new_empty((_rows(plan) - kept_start, w.w_up.shape[0]), dtype=dtype)
    gate = torch.empty_like(up if w.w_gate is not None else up[:0])
    for shard, (start, stop) in enumerate(spans):
        if start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            x_shard = gathered_once(over, plan, x, shard, dtype)
            steps.up_projections(x_shard, w, gate[rows] if w.w_gate is not None else None, up[rows])
            del x_shard
    return gate, up


def sequence_forward(
    over: RankGroup,
    plan: SequencePlan,
    x: Tensor,
    w: Weights,
    kept: Kept,
    activation: str,
    y: Tensor,
    steps: Steps = EAGER,
) -> None:
    """Writes y [T / R, H_out], whose dtype is the compute dtype. Kept shards are not gathered: their gate and up are there."""
    w, gated, spans = w.cast(y.dtype), w.w_gate is not None, plan.spans
    kept_start = _rows(plan) - (kept[1].shape[0] if kept else 0)
    first_kept = sum(start < kept_start for start, _ in spans)
    buffers = buffers_of(2 if gated else 1, _longest(plan), y, w.w_up.shape[0])
    sums = Scattered(over, plan, y)

    def down(shard: int, h: Tensor) -> None:
        sums.wait()  # while h was computed; its buffer is free for this shard's partial sums
        partial = y.new_empty((h.shape[0], y.shape[1]))
        sums.start(shard, steps.linear(h, w.w_down, None, partial))

    for shard, (x_shard,) in gathered(over, plan, [x], y.dtype, first_kept):
        scratch = [buffer[: x_shard.shape[0]] for buffer in buffers]
        down(shard, steps.hidden(activation, x_shard, w, scratch))
        del x_shard  # before the next gather starts
    for shard, (start, stop) in enumerate(spans[first_kept:], first_kept):
        assert kept is not None
        rows = slice(start - kept_start, stop - kept_start)
        gate = kept[0][rows] if gated else None
        down(shard, steps.combine(activation, gate, kept[1][rows], buffers[0][: stop - start]))
    sums.wait()
    if w.b_down is not None:
        y += w.b_down


def sequence_backward(
    over: RankGroup,
    plan: SequencePlan,
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    kept: Kept,
    activation: str,
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None] | None = None,
    steps: Steps = EAGER,
) -> list[Tensor | None]:
    """Gradients of this rank's x and of every operand of `weights`, in that order, as `mlp_backward`.

    Those of the weights and of all biases are complete: every rank sees dy of all tokens.
    """
    dtype, gated = dy.dtype, weights.w_gate is not None
    w, spans = weights.cast(dtype), plan.spans
    needs_dx, *needs_dw = needs
    weight_sums = gradient_sums(weights, needs_dw, main_grads, single=len(plan) <= 1, dtype=dtype, steps=steps)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
    sums = None if dx is None else Scattered(over, plan, dx)
    kept_start = _rows(plan) - (kept[1].shape[0] if kept else 0)
    buffers = buffers_of(3 if gated else 2, _longest(plan), dy, w.w_up.shape[0])
    for shard, (x_shard, dy_shard) in gathered(over, plan, [x, dy], dtype):
        start, stop = spans[shard]
        scratch = [buffer[: stop - start] for buffer in buffers]
        gate, up = (scratch[0] if gated else None), scratch[-2]
        if kept and start >= kept_start:
            rows = slice(start - kept_start, stop - kept_start)
            gate, up = (kept[0][rows] if gated else None), kept[1][rows]
        else:
            steps.up_projections(x_shard, w, gate, up)
        dgate, h, dup = steps.hidden_gradients(activation, dy_shard, w, gate, up, scratch)
        if sums is not None:
            sums.wait()
            partial = torch.empty_like(x_shard)
            steps.dx(dgate, dup, w, partial)
            sums.start(shard, partial)  # under way while the weight gradients are computed
            del partial
        add_weight_gradients(weight_sums, x_shard, dy_shard, dgate, dup, h)
        del x_shard, dy_shard  # before the next gather starts
    if sums is not None:
        sums.wait()
    return [dx, *(None if total is None else total.result() for total in weight_sums)]


def _rows(plan: SequencePlan) -> int:
    """Rows of all gathered shards end to end, padding included."""
    return plan.spans[-1][1] if len(plan) else 0


def _longest(plan: SequencePlan) -> int:
    return plan.spans[0][1] if len(plan) else 0

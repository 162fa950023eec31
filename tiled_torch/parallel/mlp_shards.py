"""The loops of the MLP whose weights and tokens are split over ranks, one gathered shard at a time. No autograd here.

As `functional/mlp_shards.py`, with this rank's columns of gate and up and rows of down: y and dx of a shard are partial
sums, which are reduced and scattered while the next shard computes. Letters: R ranks, t local tokens of a shard, I / R the
rank's part of the intermediate size. x: [T / R, H]; w_gate, w_up: [I / R, H]; w_down: [H_out, I / R].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_specs.partitions import SequencePlan
from tiled_torch.functional.mlp_shards import add_down_gradients, add_up_gradients, gradient_sums
from tiled_torch.functional.steps import EAGER, Steps, Weights
from tiled_torch.parallel.groups import RankGroup
from tiled_torch.parallel.sequence import Gathers, Scattered, gathered

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
    for shard, x_shard in gathered(over, plan, x, dtype, range(_first_kept(plan, kept_start), len(plan))):
        rows = slice(spans[shard][0] - kept_start, spans[shard][1] - kept_start)
        steps.up_projections(x_shard, w, gate[rows] if w.w_gate is not None else None, up[rows])
        del x_shard  # before the next gather starts
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
    first_kept = _first_kept(plan, kept_start)
    buffers = steps.buffers(2 if gated else 1, _longest(plan), y, w.w_up.shape[0])
    sums = Scattered(over, plan, y)

    def down(shard: int, h: Tensor) -> None:
        sums.wait()  # while h was computed; its buffer is free for this shard's partial sums
        partial = y.new_empty((h.shape[0], y.shape[1]))
        sums.start(shard, steps.linear(h, w.w_down, None, partial))

    for shard, x_shard in gathered(over, plan, x, y.dtype, range(first_kept)):
        scratch = steps.scratch(buffers, x_shard.shape[0])
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

    Those of the weights and of all biases are complete: every rank sees dy of all tokens. Of the gathered shards of x and
    dy two exist at a time, in use or on their way: dy is let go of as soon as w_down's gradient has it, for x or dy of the
    next shard to travel under the products that are left, and the one still missing travels under the next shard's first.
    """
    dtype, gated = dy.dtype, weights.w_gate is not None
    w, spans = weights.cast(dtype), plan.spans
    needs_dx, *needs_dw = needs
    weight_sums = gradient_sums(weights, needs_dw, main_grads, single=len(plan) <= 1, dtype=dtype, steps=steps)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
    sums = None if dx is None else Scattered(over, plan, dx)
    kept_start = _rows(plan) - (kept[1].shape[0] if kept else 0)
    buffers = steps.buffers(3 if gated else 2, _longest(plan), dy, w.w_up.shape[0])
    first_kept = _first_kept(plan, kept_start)
    needed = (one for shard in range(len(plan)) for one in _in_order(x, dy, shard, kept=shard >= first_kept))
    gathers = Gathers(over, plan, needed, dtype)
    for shard, (start, stop) in enumerate(spans):
        scratch, x_shard = steps.scratch(buffers, stop - start), None
        gate, up = (scratch[0] if gated else None), scratch[-2]
        if kept and shard >= first_kept:
            rows = slice(start - kept_start, stop - kept_start)
            gate, up = (kept[0][rows] if gated else None), kept[1][rows]
        else:
            x_shard = gathers.take()
            steps.up_projections(x_shard, w, gate, up)
        dy_shard = gathers.take()
        dgate, h, dup = steps.hidden_gradients(activation, dy_shard, w, gate, up, scratch)
        add_down_gradients(weight_sums, dy_shard, h)
        del dy_shard  # before the next gather starts
        gathers.let_go()
        if sums is not None:
            sums.wait()
            partial = dup.new_empty((stop - start, x.shape[1]))
            steps.dx(dgate, dup, w, partial)
            sums.start(shard, partial)  # under way while the weight gradients are computed
            del partial
        add_up_gradients(weight_sums, gathers.take() if x_shard is None else x_shard, dgate, dup)
        del x_shard
        gathers.let_go()
    if sums is not None:
        sums.wait()
    return [dx, *(None if total is None else total.result() for total in weight_sums)]


def _in_order(x: Tensor, dy: Tensor, shard: int, *, kept: bool) -> tuple[tuple[Tensor, int], ...]:
    """What backward needs of a shard, first what it needs first: x, unless gate and up are kept."""
    return ((dy, shard), (x, shard)) if kept else ((x, shard), (dy, shard))


def _first_kept(plan: SequencePlan, kept_start: int) -> int:
    """The number of the first shard whose gate and up are kept."""
    return sum(start < kept_start for start, _ in plan.spans)


def _rows(plan: SequencePlan) -> int:
    """Rows of all gathered shards end to end, padding included."""
    return plan.spans[-1][1] if len(plan) else 0


def _longest(plan: SequencePlan) -> int:
    return plan.spans[0][1] if len(plan) else 0

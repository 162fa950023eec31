"""The loops of the tiled MLP over shards of tokens: what is kept, forward, backward. No autograd here.

`mlp/api.py` differentiates a call in eager mode, `mlp/compiled.py` makes operators of one. The same loops serve
tokens that are split over ranks (`mlp/ranks.py`), which arrive and leave a shard at a time (`Rows`). What a shard computes
is in `steps.py` (PyTorch operations; on some CPUs `steps_onednn.py`) and `steps_kernels.py` (Triton).
Letters: T tokens, H hidden, I intermediate, t tokens of a shard. x: [T, H]; w_gate, w_up: [I, H]; w_down: [H_out, I].
Nothing of shape [T, I] is ever allocated: the buffers are [t, I] and every shard reuses them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared_specs.core import checks
from shared_specs.kernels.blocks import DETERMINISTIC
from shared_specs.shards import ShardPlan
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.row_shards import Rows
from tiled_torch.core.tensors import rows_of
from tiled_torch.mlp import steps_onednn
from tiled_torch.mlp.steps import EAGER, Steps, Weights

Kept = tuple[Tensor, Tensor] | None  # gate and up of the last tokens, each [kept tokens, I]; gate [0, I] without a gate


def steps_for(name: str, x: Tensor, w: Weights, plan: ShardPlan, dtype: torch.dtype) -> Steps:
    """Return who computes the shards of one pass: "eager", "triton" or "deterministic" (Triton, with no product of the
    vendor's).
    """
    if name == "eager":
        return steps_onednn.OneDNNSteps() if steps_onednn.pays(x, w, plan, dtype) else EAGER
    from tiled_torch.mlp import steps_kernels

    paths = DETERMINISTIC if name == "deterministic" else steps_kernels.fastest_paths(x, w, dtype)
    return steps_kernels.KernelSteps(paths)


@dataclass(frozen=True)
class MLPCall:
    """The static part of one call, and its loops. x: [..., H]; steps: as `steps_for` names them.

    kept_start: the first row, in the order of the shards, whose gate and up are kept for backward. owners: the whole
    parameters, where the operands are this rank's parts of them; else None.
    """

    function: str
    dtype: torch.dtype
    activation: str
    shard_tokens: int
    steps: str
    kept_start: int = 0
    owners: tuple[Tensor | None, ...] = (None,) * 6

    def rows(self, x: Tensor) -> Rows:
        """Return x, shard by shard."""
        return Rows(rows_of(x), ShardPlan(checks.flat_tokens(x.shape), self.shard_tokens))

    def kept(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """Return gate and up of the rows from `kept_start` on."""
        rows, first = self.rows(x), self.kept_start
        count = rows.plan.tokens - first
        if not count:
            none = torch.empty((0, w.w_up.shape[0]), dtype=self.dtype, device=x.device)
            return none, torch.empty_like(none)
        with without_autocast(x):
            w = w.cast(self.dtype)
            steps = steps_for(self.steps, x, w, rows.plan, self.dtype)
            if rows.here and x.dtype == self.dtype and isinstance(steps, steps_onednn.OneDNNSteps):
                return steps_onednn.up_projections_of_rows(rows.x[first:], w)
            up = torch.empty((count, w.w_up.shape[0]), dtype=self.dtype, device=x.device)
            gate = torch.empty_like(up if w.w_gate is not None else up[:0])
            for _, place, x_shard in rows.shards(self.dtype, _first_kept(rows.plan, first)):
                of_shard = slice(place.start - first, place.stop - first)
                steps.up_projections(x_shard, w, gate[of_shard] if w.w_gate is not None else None, up[of_shard])
                del x_shard  # before the next one is made
            return gate, up

    def forward(self, x: Tensor, w: Weights, kept: Kept) -> Tensor:
        """y [..., H_out], whose dtype is the compute dtype. Of kept shards x is not read."""
        y = torch.empty((*x.shape[:-1], w.w_down.shape[0]), dtype=self.dtype, device=x.device)
        with torch.no_grad(), without_autocast(x):
            rows, w, gated = self.rows(x), w.cast(y.dtype), w.w_gate is not None
            plan, written = rows.plan, rows.written(rows_of(y), y.dtype)
            steps = steps_for(self.steps, x, w, plan, y.dtype)
            kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
            first_kept = _first_kept(plan, kept_start)
            buffers = steps.buffers(2 if gated else 1, plan.longest, y, w.w_up.shape[0])
            for shard, _, x_shard in rows.shards(y.dtype, 0, first_kept):
                h = steps.hidden(self.activation, x_shard, w, steps.scratch(buffers, x_shard.shape[0]))
                del x_shard  # before the next one is made
                steps.linear(h, w.w_down, w.b_down, written.start(shard))
                written.done()
            for shard, (start, stop) in enumerate(plan.spans[first_kept:] if kept else (), first_kept):
                gate, up = _kept_rows(kept, gated, slice(start - kept_start, stop - kept_start))
                h = steps.combine(self.activation, gate, up, steps.scratch(buffers, stop - start)[0])
                steps.linear(h, w.w_down, w.b_down, written.start(shard))
                written.done()
            written.finish()
        return y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        kept: Kept,
        needs: Sequence[bool],
        main_grads: Sequence[Tensor | None] = (None,) * 6,
    ) -> list[Tensor | None]:
        """Return gradients of x and of every operand of `weights`, in that order; None where `needs` says so or main_grad
        took it.

        gate and up are recomputed shard by shard (kept ones are read), the down-projection never. Three buffers [t, I]
        suffice (two without a gate): dgate, h and dup are written over gate, up and dh, or over whichever of them the
        steps choose. Of the shards of x and dy two exist at a time, in use or on their way: dy is let go of as soon as
        w_down's gradient has it, for x or dy of the next shard to travel under the products that are left, and the one
        still missing travels under the next shard's first.
        """
        with without_autocast(x):
            dtype, gated, rows = dy.dtype, weights.w_gate is not None, self.rows(x)
            plan, w = rows.plan, weights.cast(dtype)
            steps = steps_for(self.steps, x, w, plan, dtype)
            sums = [
                GradientSum(p, main, single=len(plan) <= 1 and p.dtype == dtype, sums=steps)
                if p is not None and need
                else None
                for p, need, main in zip(weights, needs[1:], main_grads, strict=True)
            ]
            dw_gate, dw_up, dw_down, db_gate, db_up, db_down = sums
            dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
            written = None if dx is None else rows.written(rows_of(dx), dtype)
            kept_start = plan.tokens - (kept[1].shape[0] if kept else 0)
            first_kept = _first_kept(plan, kept_start)
            buffers = steps.buffers(3 if gated else 2, plan.longest, dy, w.w_up.shape[0])
            taken = rows.taken(_in_order(rows.x, rows_of(dy), len(plan), first_kept), dtype)
            for shard, (start, stop) in enumerate(plan.spans):
                scratch, x_shard = steps.scratch(buffers, stop - start), None
                if shard < first_kept:
                    gate, up = (scratch[0] if gated else None), scratch[-2]
                    x_shard = taken.take()
                    steps.up_projections(x_shard, w, gate, up)
                else:
                    gate, up = _kept_rows(kept, gated, slice(start - kept_start, stop - kept_start))
                dy_shard = taken.take()
                dgate, h, dup = steps.hidden_gradients(self.activation, dy_shard, w, gate, up, scratch)
                if dw_down is not None:
                    dw_down.add_product(dy_shard, h)
                if db_down is not None:
                    db_down.add_rows(dy_shard)
                del dy_shard  # before the next one is made
                taken.let_go()
                if written is not None:  # nothing of the shard needs h any more
                    steps.dx(dgate, dup, w, written.start(shard))
                    written.done()  # under way while the weight gradients are computed
                x_shard = taken.take() if x_shard is None else x_shard
                if dw_gate is not None and dgate is not None:
                    dw_gate.add_product(dgate, x_shard)
                if dw_up is not None:
                    dw_up.add_product(dup, x_shard)
                if db_gate is not None and dgate is not None:
                    db_gate.add_rows(dgate)
                if db_up is not None:
                    db_up.add_rows(dup)
                del x_shard
                taken.let_go()
            if written is not None:
                written.finish()
            return [dx, *(None if total is None else total.result() for total in sums)]


def _first_kept(plan: ShardPlan, kept_start: int) -> int:
    """Return the number of the first shard whose gate and up are kept."""
    return sum(start < kept_start for start, _ in plan.spans)


def _kept_rows(kept: Kept, gated: bool, of_shard: slice) -> tuple[Tensor | None, Tensor]:
    assert kept is not None
    return (kept[0][of_shard] if gated else None), kept[1][of_shard]


def _in_order(x: Tensor, dy: Tensor, shards: int, first_kept: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows that backward needs of every shard, in that order: x first, unless gate and up are kept."""
    for shard in range(shards):
        for a in (x, dy) if shard < first_kept else (dy, x):
            yield a, shard

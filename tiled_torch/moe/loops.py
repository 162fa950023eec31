"""The loops of tiled experts: forward, backward. No autograd nodes here.

y of a token is the sum over its experts of weight * (gate(x W_up + b_up) W_down + b_down), `gate` being what stands between an
expert's two products. Letters: T tokens, H hidden, k experts of a token, E experts, W columns of the first product (2I where
there is a gate), I of the second, n rows of one piece, at most t of them. Nothing [T k, ...] but numbers of rows ever exists.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shared_specs.mlp.costs import block_rows
from shared_specs.moe.costs import FEW_ELEMENTS
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.tensors import device_kind, wide_dtype
from tiled_torch.moe.routes import ExpertPart, ExpertRows, Routes
from tiled_torch.moe.steps import ExpertWeights, Products, products_of, takes_several
from tiled_torch.moe.sums import ExpertSum


@dataclass(frozen=True)
class ExpertsCall:
    """The static part of one call, and its loops. x: [T, H]; index, weights: [T, k].

    gate: [n, W] -> [n, I], row by row. weigh_input: the weight of a token multiplies x, and not what comes out.
    """

    dtype: torch.dtype
    shard_tokens: int
    gate: Callable[[Tensor], Tensor]
    transposed: bool = False
    weigh_input: bool = False

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, w: ExpertWeights, into: Tensor | None = None
    ) -> Tensor:
        """y [T, H_out] in the dtype of x, or `into`, which it is written to; summed over a token's experts in float32."""
        with torch.no_grad(), without_autocast(x):
            out = w.down.shape[2 if self.transposed else 1]
            y = torch.empty((x.shape[0], out), dtype=x.dtype, device=x.device) if into is None else into
            routes = self._routes(index, w, self.shard_tokens)
            for tokens, runs in routes:
                total = _zeros_for(y, tokens, self.wide)
                for run in runs:
                    products = products_of(w, run, self.dtype, self.transposed)
                    self._add_outputs(total, x, weights, products, routes, run, tokens.start)
                    del products  # with what was cast for it, before the next is made
                _store(y, tokens, total)
                del total  # before that of the next group is made
        return y

    def _add_outputs(
        self, total: Tensor, x: Tensor, weights: Tensor, products: Products, routes: Routes, run: ExpertRows, first: int
    ) -> None:
        for piece in run.pieces:
            pairs = routes.order[piece]
            rows = pairs // routes.each
            weight = weights.reshape(-1)[pairs].to(self.wide)[:, None]
            up = products.first(self._input(x.index_select(0, rows), weight))
            h = torch.empty((up.shape[0], products.w.width(self.transposed)), dtype=self.dtype, device=x.device)
            for block in _row_blocks(up):
                h[block] = self.gate(up[block].to(self.wide))
            del up
            outputs = products.second(h).to(self.wide)
            total.index_add_(0, rows - first, outputs if self.weigh_input else outputs.mul_(weight))

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        needs: Sequence[bool],
        main_grads: Sequence[Tensor | None] = (None,) * 5,
    ) -> list[Tensor | None]:
        """Return gradients of x, weights and every operand; None where `needs` says so or main_grad took it.

        The first product is recomputed, the second never: the gradient of a weight is <gate(..), dy W_down^T> + <b_down, dy>,
        of which the products are those of h's gradient. Beside one piece there are the sums of x's gradient for one group
        of tokens: of so many that they take no more memory than the sums of all weights, which more groups would need.
        """
        with torch.no_grad(), without_autocast(x), saved_tensors_hooks(_same, _same):
            tokens = x.shape[0]
            length = self._group_tokens(x, w) if any(needs[2:]) else self.shard_tokens
            routes = self._routes(index, w, length)
            dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
            dweights = torch.zeros(tokens * routes.each, dtype=self.wide, device=x.device)
            sums = [
                ExpertSum(p, main, once=routes.groups <= 1) if p is not None and need else None
                for p, need, main in zip(w, needs[2:], main_grads, strict=True)
            ]
            for place, runs in routes:
                total = None if dx is None else _zeros_for(dx, place, self.wide)
                for run in runs:
                    products = products_of(w, run, self.dtype, self.transposed)
                    for piece in run.pieces:
                        pairs = routes.order[piece]
                        rows = pairs // routes.each
                        weight = weights.reshape(-1)[pairs].to(self.wide)[:, None]
                        dx_rows, dweights[pairs] = self._gradients(
                            dy.index_select(0, rows).to(self.dtype),
                            x.index_select(0, rows),
                            weight,
                            products,
                            run.parts(piece),
                            sums,
                            dx is not None,
                        )
                        if total is not None and dx_rows is not None:
                            total.index_add_(0, rows - place.start, dx_rows)
                    del products
                if dx is not None and total is not None:
                    _store(dx, place, total)
                del total
            found = dweights.view(weights.shape).to(weights.dtype) if needs[1] else None
            return [dx, found, *(None if one is None else one.result() for one in sums)]

    def _gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        products: Products,
        parts: Sequence[ExpertPart],
        sums: Sequence[ExpertSum | None],
        wants_dx: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the rows of dx, in float32, and the gradient of every weight, of one piece; add to the sums."""
        d_up, d_down, db_up, db_down, d_gate = sums
        taken = self._input(x, weight)
        up = products.first(taken)
        dh = products.gradient_of_h(dy)
        dweight = self._through_gate(up, dh, weight)  # from here on up is its gradient, and dh is weight * h
        if d_down is not None:
            d_down.add_products(parts, *((dh, dy) if self.transposed else (dy, dh)))
        del dh
        if products.w.b_down is not None:
            wide = dy.to(self.wide)
            if not self.weigh_input:
                dweight += products.times_bias(wide)
            if db_down is not None:
                db_down.add_rows(parts, wide if self.weigh_input else wide * weight)
            del wide
        del dy
        halves = [(d_up, up)] if products.w.gate is None else [*zip((d_gate, d_up), up.chunk(2, dim=1), strict=True)]
        for total, d in halves:
            if total is not None:
                total.add_products(parts, *((taken, d) if self.transposed else (d, taken)))
        if db_up is not None:
            db_up.add_rows(parts, up)
        if not (wants_dx or self.weigh_input):
            return None, dweight
        dx = products.gradient_of_x([d for _, d in halves]).to(self.wide)
        if self.weigh_input:
            dweight = (dx * x).sum(-1)
            dx *= weight
        return dx, dweight

    def _through_gate(self, up: Tensor, dh: Tensor, weight: Tensor) -> Tensor:
        """From up and the gradient of h before it is weighed: up's gradient, over up, and weight * h, over dh.

        Returns the gradients of the weights, [n].
        """
        dweight = torch.zeros(up.shape[0], dtype=self.wide, device=up.device)
        for block in _row_blocks(up):
            leaf = up[block].to(self.wide).detach().requires_grad_()
            with torch.enable_grad():
                h = self.gate(leaf)
            known, dh_block = h.detach(), dh[block].to(self.wide)
            if not self.weigh_input:
                dweight[block] = (known * dh_block).sum(-1)
                known, dh_block = known * weight[block], dh_block * weight[block]
            (dup,) = torch.autograd.grad(h, leaf, dh_block)
            up[block], dh[block] = dup, known
        return dweight

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.dtype)

    def _group_tokens(self, x: Tensor, w: ExpertWeights) -> int:
        """Return how many tokens, in whole shards, the sums of dx are made for at once."""
        most = sum(a.numel() for a in (w.gate, w.up, w.down) if a is not None) // x.shape[1]
        if most >= x.shape[0]:
            return max(1, x.shape[0])
        return max(1, most // self.shard_tokens) * self.shard_tokens

    def _input(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((x * weight) if self.weigh_input else x).to(self.dtype)

    def _routes(self, index: Tensor, w: ExpertWeights, group_tokens: int) -> Routes:
        several = takes_several(w, self.dtype)
        return Routes(index, w.down.shape[0], group_tokens, self.shard_tokens, several=several)


def _zeros_for(whole: Tensor, rows: slice, wide: torch.dtype) -> Tensor:
    """Return zeros to sum the rows of `whole` in: these themselves where they are wide enough."""
    return (whole[rows] if whole.dtype == wide else torch.empty_like(whole[rows], dtype=wide)).zero_()


def _store(whole: Tensor, rows: slice, total: Tensor) -> None:
    if total.dtype != whole.dtype:
        whole[rows] = total


def _row_blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of the rows between which elementwise work is divided; experts with few rows are not cut for a few bytes."""
    step = max(block_rows(rows.shape[0], rows.shape[1], device_kind(rows.device)), FEW_ELEMENTS // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield slice(start, min(start + step, rows.shape[0]))


def _same(tensor: Tensor) -> Tensor:
    return tensor

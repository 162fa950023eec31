"""A mixture of experts, differentiable. Two autograd nodes, as `tiled_mlp` has, and for its reason.

`SaveMoE` chooses the experts, keeps x, the choice and the weights, and owns the backward; `RunMoE` computes y. So the replay of
non-reentrant checkpointing computes the router, and none of the experts, where nothing after them saves a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiled_torch.core.gradients import GradientSum, local_main_grad, main_grad_of, returned_gradient
from tiled_torch.core.tensors import refuse_second_order, rows_of
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.router import Router
from tiled_torch.moe.steps import ExpertWeights

_UNTILED = "; differentiate the untiled experts, or use tiled_jax."


@dataclass(frozen=True)
class MoECall:
    """The static part of one call, and its passes. x: [..., H]; w: w_router, w_gate, w_up, w_down."""

    router: Router
    experts: ExpertsCall
    keep_logits: bool

    def choose(self, x: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what every expert of a token counts, its number, both [T, k], and the logits [..., E], or none of them."""
        shape = (*x.shape[:-1], w_router.shape[0]) if self.keep_logits else (0,)
        logits = torch.empty(shape, dtype=self.router.wide, device=x.device)
        kept = rows_of(logits) if self.keep_logits else None
        return *self.router.forward(rows_of(x), w_router, kept), logits

    def mix(self, x: Tensor, index: Tensor, weights: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """y [..., H]."""
        y = torch.empty(x.shape, dtype=self.experts.dtype, device=x.device)
        self.experts.forward(rows_of(x), index, weights, _operands(experts), rows_of(y))
        return y

    def backward(
        self,
        dy: Tensor | None,
        dlogits: Tensor | None,
        x: Tensor,
        chosen: tuple[Tensor, Tensor],
        w: Sequence[Tensor],
        needs: Sequence[bool],
        mains: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return gradients of x and of every weight; None where `needs` says so, main_grad took it, or nothing reaches it.

        chosen: what the experts count and their numbers. dy None: of the logits alone.
        """
        rows, (weights, index), (w_router, *experts) = rows_of(x), chosen, w
        dx = dweights = None
        gradients: list[Tensor | None] = [None, None, None]
        if dy is not None:
            # In the order of ExpertWeights: up, down, two biases, gate.
            wanted = [needs[0], needs[0] or needs[1], needs[3], needs[4], False, False, needs[2]]
            main = [mains[2], mains[3], None, None, mains[1]]
            found = self.experts.backward(rows_of(dy), rows, index, weights, _operands(experts), wanted, main)
            dx, dweights, up, down, _, _, gate = found
            gradients = [gate, up, down]
        elif needs[0]:
            dx = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        of_router = None
        if needs[0] or needs[1]:
            single = rows.shape[0] <= self.router.shard_tokens
            total = GradientSum(w_router, mains[0], single=single) if needs[1] else None
            self.router.backward(
                rows, w_router, index, dweights, None if dlogits is None else rows_of(dlogits), dx, total
            )
            of_router = None if total is None else total.result()
        return [None if dx is None else dx.view(x.shape), of_router, *gradients]


def mixed(x: Tensor, w: Sequence[Tensor], call: MoECall) -> tuple[Tensor, Tensor | None]:
    """Return y [..., H] and the router's logits [..., E], None where the call has none. w: the router's and the experts'."""
    if not (torch.is_grad_enabled() and any(a.requires_grad for a in (x, *w))):
        weights, index, logits = call.choose(x, w[0])
        y = call.mix(x, index, weights, w[1:])
    else:
        anchor, weights, index, logits = SaveMoE.apply(x, *w, call)
        y = RunMoE.apply(anchor, weights, index, *(a.detach() for a in (x, *w[1:])), call)
    return y, logits if call.keep_logits else None


class SaveMoE(torch.autograd.Function):
    """Packs x, the choice and the weights; owns the backward. Outputs: an anchor, one element seen in y's shape, what the
    experts count, their numbers, and the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *w, call = args
        ctx.call = call
        ctx.set_materialize_grads(False)
        weights, index, logits = call.choose(x, w[0])
        # x: gate, up and the logits are recomputed from it; weights and index: who takes which rows; w: all products.
        ctx.save_for_backward(x, *w, weights, index)
        ctx.mark_non_differentiable(weights, index, *(() if call.keep_logits else (logits,)))
        # Saved-tensor hooks may hand back other tensor objects; only the parameters themselves carry main_grad.
        ctx.fused = [a if main_grad_of(a) is not None else None for a in w]
        return torch.zeros((), dtype=call.experts.dtype, device=x.device).expand(x.shape), weights, index, logits

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any, __: Any, dlogits: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None and dlogits is None:
            return (None,) * 6
        refuse_second_order("tiled_moe", _UNTILED)
        x, *w, weights, index = ctx.saved_tensors
        mains = [None if o is None else local_main_grad(o, a.shape) for o, a in zip(ctx.fused, w, strict=True)]
        found = ctx.call.backward(dy, dlogits, x, (weights, index), w, ctx.needs_input_grad[:5], mains)
        returned = (
            d if owner is None else returned_gradient(owner, d, a.shape, a.dtype)
            for owner, a, d in zip(ctx.fused, w, found[1:], strict=True)
        )
        return found[0], *returned, None


class RunMoE(torch.autograd.Function):
    """Computes y from detached operands; saves nothing and hands dy to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor, index: Tensor, x: Tensor, *args: Any) -> Tensor:
        *experts, call = args
        return call.mix(x, index, weights, experts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *(None,) * 7)


def _operands(experts: Sequence[Tensor]) -> ExpertWeights:
    gate, up, down = experts
    return ExpertWeights(up, down, gate=gate)

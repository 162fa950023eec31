"""Tiled experts, differentiable. Two autograd nodes, as `tiled_mlp` has, and for its reason.

`SaveExperts` keeps x, the router's choice and the parameters, computes nothing and owns the backward; `RunExperts` computes y.
So the replay of non-reentrant checkpointing stops before the experts' products, where nothing after them saves a tensor.
"""

from typing import Any

import torch
from torch import Tensor

from tiled_torch.core.gradients import local_main_grad, main_grad_of, returned_gradient
from tiled_torch.core.replay import is_unread
from tiled_torch.core.tensors import refuse_second_order
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.steps import ExpertWeights

FORMULA = "tiled_experts"  # as `tiling_paths` has it
_UNTILED = "; differentiate the untiled experts."


def run(x: Tensor, index: Tensor, weights: Tensor, operands: ExpertWeights, call: ExpertsCall) -> Tensor:
    """Return y [T, H_out]. x: [T, H]; index, weights: [T, k]."""
    needed = (x, weights, *operands)
    if not (torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in needed)):
        return call.forward(x, index, weights, operands)
    anchor: Tensor = SaveExperts.apply(x, weights, index, *operands, call)
    if is_unread(FORMULA):
        return anchor
    return RunExperts.apply(
        anchor, x.detach(), weights.detach(), index, *(a if a is None else a.detach() for a in operands), call
    )


class SaveExperts(torch.autograd.Function):
    """Packs x, the choice and the parameters; owns the backward. Output: an anchor, one element seen in y's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, index: Tensor, *args: Any) -> Tensor:
        operands, ctx.call = ExpertWeights(*args[:-1]), args[-1]
        ctx.set_materialize_grads(False)
        # x: the first product is recomputed from it; weights and index: who takes which rows; the operands: both products.
        ctx.save_for_backward(x, weights, index, *operands)
        # Saved-tensor hooks may hand back other tensor objects; only the parameters themselves carry main_grad.
        ctx.fused = [a if main_grad_of(a) is not None else None for a in operands]
        out = operands.down.shape[2 if ctx.call.transposed else 1]
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape[0], out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_second_order("tile_model", _UNTILED)
        x, weights, index, *found = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3:-1]]
        mains = [
            None if a is None else local_main_grad(owner, a.shape) for owner, a in zip(ctx.fused, found, strict=True)
        ]
        dx, dweights, *gradients = ctx.call.backward(dy, x, index, weights, ExpertWeights(*found), needs, mains)
        returned = (
            d if owner is None else returned_gradient(owner, d, a.shape, a.dtype)
            for owner, a, d in zip(ctx.fused, found, gradients, strict=True)
        )
        return dx, dweights, None, *returned, None


class RunExperts(torch.autograd.Function):
    """Computes y from detached operands; saves nothing and hands dy to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weights: Tensor, index: Tensor, *args: Any) -> Tensor:
        return args[-1].forward(x, index, weights, ExpertWeights(*args[:-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *(None,) * (len(ctx.needs_input_grad) - 1))

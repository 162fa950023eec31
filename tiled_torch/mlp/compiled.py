"""The loops of the tiled MLP as opaque operators, for torch.compile and torch.export: a graph holds one node, not N shards.

In eager mode the Python loops run directly, so that FLOP and live bytes can be counted. What differentiates them under
torch.compile is in `mlp/api.py`; a program that torch.export made has the formula registered here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared_specs.core.checks import flat_tokens
from tiled_torch.core.gradients import main_grad_of, refuse_compiled_main_grad
from tiled_torch.mlp.loops import Kept, MLPCall
from tiled_torch.mlp.steps import Weights


def _both(kept_gate: Tensor | None, kept_up: Tensor | None) -> Kept:
    return None if kept_gate is None or kept_up is None else (kept_gate, kept_up)


class CompiledCall(MLPCall):
    """A call whose loops are the operators below."""

    def kept(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        if any(main_grad_of(a) is not None for a in w):
            refuse_compiled_main_grad()
        return kept(x, *w, self.dtype, self.shard_tokens, self.steps, self.kept_start)

    def forward(self, x: Tensor, w: Weights, kept: Kept) -> Tensor:
        both = (None, None) if kept is None else kept
        return forward(x, *w, *both, self.dtype, self.activation, self.shard_tokens, self.steps)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        kept: Kept,
        needs: Sequence[bool],
        main_grads: Sequence[Tensor | None] = (None,) * 6,
    ) -> list[Tensor | None]:
        both = (None, None) if kept is None else kept
        found = iter(backward(dy, x, *weights, *both, self.activation, self.shard_tokens, self.steps, list(needs)))
        return [next(found) if need else None for need in needs]


@torch.library.custom_op("tiled_mlp::forward", mutates_args=())
def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    kept_gate: Tensor | None,
    kept_up: Tensor | None,
    dtype: torch.dtype,
    activation: str,
    shard_tokens: int,
    steps: str,
) -> Tensor:
    call = MLPCall("tiled_mlp", dtype, activation, shard_tokens, steps)
    return call.forward(x, Weights(w_gate, w_up, w_down, b_gate, b_up, b_down), _both(kept_gate, kept_up))


@forward.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, kept_gate, kept_up, dtype, activation, shard_tokens, steps):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], w_down.shape[0]), dtype=dtype)


@torch.library.custom_op("tiled_mlp::kept", mutates_args=())
def kept(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    dtype: torch.dtype,
    shard_tokens: int,
    steps: str,
    kept_start: int,
) -> tuple[Tensor, Tensor]:
    call = MLPCall("tiled_mlp", dtype, "", shard_tokens, steps, kept_start)  # no activation is applied
    return call.kept(x, Weights(w_gate, w_up, w_down, b_gate, b_up, b_down))


@kept.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, dtype, shard_tokens, steps, kept_start):  # type: ignore[no-untyped-def]
    tokens = flat_tokens(x.shape) - kept_start
    up = x.new_empty((tokens, w_up.shape[0]), dtype=dtype)
    return x.new_empty((tokens if w_gate is not None else 0, w_up.shape[0]), dtype=dtype), up


@torch.library.custom_op("tiled_mlp::backward", mutates_args=())
def backward(
    dy: Tensor,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    kept_gate: Tensor | None,
    kept_up: Tensor | None,
    activation: str,
    shard_tokens: int,
    steps: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients that `needs` asks for, among x, the weights and the biases, in that order."""
    call = MLPCall("tiled_mlp", dy.dtype, activation, shard_tokens, steps)
    weights = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    grads = call.backward(dy, x, weights, _both(kept_gate, kept_up), needs)
    return [grad for grad in grads if grad is not None]


@backward.register_fake
def _(dy, x, w_gate, w_up, w_down, b_gate, b_up, b_down, kept_gate, kept_up, activation, shard_tokens, steps, needs):  # type: ignore[no-untyped-def]
    operands = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return [
        torch.empty_like(a, memory_format=torch.contiguous_format)
        for a, need in zip(operands, needs, strict=True)
        if need
    ]


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def _no_gradients(ctx: Any, *_: Tensor) -> tuple[None, ...]:
    return (None,) * 11


# What is kept stands for a recomputation: `forward` has the gradients of all of it.
kept.register_autograd(_no_gradients, setup_context=_keep_nothing)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, (_, ctx.activation, ctx.shard_tokens, ctx.steps) = inputs[:9], inputs[9:]
    if any(main_grad_of(w) is not None for w in operands[1:7]):
        refuse_compiled_main_grad()
    ctx.save_for_backward(*operands)


def _call_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:7])
    found = iter(backward(dy, *ctx.saved_tensors, ctx.activation, ctx.shard_tokens, ctx.steps, needs))
    return *(next(found) if need else None for need in needs), *(None for _ in range(6))


forward.register_autograd(_call_backward, setup_context=_keep_operands)

"""The loops of the tiled MLP as opaque operators, for torch.compile only: a traced graph holds one node, not N shards.

In eager mode the Python loops run directly, so that FLOP and live bytes can be counted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_specs.shards import ShardPlan
from tiled_torch.functional.mlp_shards import kept_up_projections, mlp_backward, mlp_forward, steps_named
from tiled_torch.functional.steps import Weights


def _flat(a: Tensor) -> Tensor:
    return a.reshape(a.shape[:-1].numel(), a.shape[-1])


def _both(kept_gate: Tensor | None, kept_up: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if kept_gate is None or kept_up is None else (kept_gate, kept_up)


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
    weights = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    y = torch.empty((*x.shape[:-1], w_down.shape[0]), dtype=dtype, device=x.device)
    rows, kept_both = _flat(x), _both(kept_gate, kept_up)
    plan, taken = ShardPlan(rows.shape[0], shard_tokens), steps_named(steps, x, weights, dtype)
    mlp_forward(rows, weights, kept_both, activation, plan, _flat(y), taken)
    return y


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
    rows, weights = _flat(x), Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    plan, taken = ShardPlan(rows.shape[0], shard_tokens), steps_named(steps, x, weights, dtype)
    return kept_up_projections(rows, weights, plan, kept_start, dtype, taken)


@kept.register_fake
def _(x, w_gate, w_up, w_down, b_gate, b_up, b_down, dtype, shard_tokens, steps, kept_start):  # type: ignore[no-untyped-def]
    tokens = x.shape[:-1].numel() - kept_start
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
    """The gradients that `needs` asks for, among x, the weights and the biases, in that order."""
    rows, weights = _flat(x), Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    plan = ShardPlan(rows.shape[0], shard_tokens)
    kept_both = _both(kept_gate, kept_up)
    taken = steps_named(steps, x, weights, dy.dtype)
    dx, *dws = mlp_backward(_flat(dy), rows, weights, kept_both, activation, plan, needs, [None] * 6, taken)
    grads = [None if dx is None else dx.view(x.shape), *dws]
    return [grad for grad in grads if grad is not None]


@backward.register_fake
def _(dy, x, w_gate, w_up, w_down, b_gate, b_up, b_down, kept_gate, kept_up, activation, shard_tokens, steps, needs):  # type: ignore[no-untyped-def]
    operands = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return [
        torch.empty_like(a, memory_format=torch.contiguous_format)
        for a, need in zip(operands, needs, strict=True)
        if need
    ]

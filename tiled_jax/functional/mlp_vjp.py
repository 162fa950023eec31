"""The MLP as a differentiable function of [T, H] rows: the loops of forward and backward, and what is kept in between.

`custom_vjp`: forward keeps x, the weights, and gate and up of the kept shards; backward runs the same plan, computes gate
and up of the other shards again, and sums weight gradients in float32 in the carry of its loop.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shared_specs import checks
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.functional.loops import Body, for_each_shard, gradient_of, vary_like
from tiled_jax.functional.shard_math import (
    Kernels,
    down,
    gate_and_up,
    gradients,
    hidden,
    hidden_and_pre,
    of_sum,
    sum_shape,
    wide,
)
from tiled_jax.functional.wanted import Marks, mark, marked, perturbed

_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that is static about one call; the plan of forward is the plan of backward."""

    plan: ShardPlan
    kept_start: int
    activation: str
    kernels: Kernels | None = None  # None computes with XLA alone

    @property
    def token_order(self) -> bool:
        """Whether sums over shards are made in the order of the tokens."""
        return self.kernels is not None and self.kernels.token_order


@partial(jax.tree_util.register_dataclass, data_fields=["x", "w", "kept", "wanted"], meta_fields=[])
@dataclass(frozen=True)
class Saved:
    """What backward needs."""

    x: jax.Array  # to compute gate and up again, and for dw_gate and dw_up
    w: dict[str, jax.Array]  # as given: masters are cast again, so that no cast copy stays alive between the passes
    kept: dict[str, jax.Array]  # gate and up [kept tokens, I] of the kept shards
    wanted: Marks  # operands that need a gradient: the others cost nothing


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(call: Call, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return _forward(call, x, w, keep=False)[0]


def _forward(call: Call, x: jax.Array, w: dict[str, jax.Array], *, keep: bool) -> tuple[jax.Array, dict[str, Any]]:
    """y [T, H_out], and with `keep` the pre-activations of the kept shards."""
    plan, kept_start, kernels = call.plan, call.kept_start, call.kernels
    backends.record_run("tiled_mlp", "xla" if kernels is None else "pallas")
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    kept_tokens = plan.tokens - kept_start if keep else 0

    def zeros(tokens: int, size: int) -> jax.Array:
        return vary_like(jnp.zeros((tokens, size), x.dtype), x, *w.values())

    def recomputed(start: Any, tokens: int, carry: Any) -> Any:
        y, buffers = carry
        h = hidden(_rows(x, start, tokens), cast, call.activation, kernels)
        return _set_rows(y, down(h, cast, kernels), start, 0), buffers

    def kept(start: Any, tokens: int, carry: Any) -> Any:
        y, buffers = carry
        h, pre = hidden_and_pre(_rows(x, start, tokens), cast, call.activation, kernels)
        buffers = {name: _set_rows(buffers[name], pre[name], start - kept_start, 0) for name in pre}
        return _set_rows(y, down(h, cast, kernels), start, 0), buffers

    def after_y(start: jax.Array, carry: Any) -> Any:
        start, y = lax.optimization_barrier((start, carry[0]))
        return start, (y, carry[1])

    def after_buffers(start: jax.Array, carry: Any) -> Any:
        start, buffers = lax.optimization_barrier((start, carry[1]))
        return start, (carry[0], buffers)

    intermediate = w["w_up"].shape[1]
    names = [name for name in ("gate", "up") if f"w_{name}" in w] if kept_tokens else []
    carry = zeros(plan.tokens, w["w_down"].shape[1]), {name: zeros(kept_tokens, intermediate) for name in names}
    bodies = Body(recomputed, after_y), Body(kept, after_buffers)
    return for_each_shard(plan, kept_start if keep else plan.tokens, *bodies, carry)


def _forward_saving(call: Call, x: Any, w: dict[str, Any]) -> tuple[jax.Array, Saved]:
    """The forward under differentiation: every operand comes with whether it needs a gradient."""
    operands = {"x": x, **w}
    changing = perturbed(operands)
    if call.token_order and set(changing) - {"x"}:
        checks.check_deterministic_shards("tiled_mlp", call.plan)
    wanted = mark(operands, changing)
    values = {name: operand.value for name, operand in w.items()}
    y, kept = _forward(call, x.value, values, keep=True)
    return y, Saved(x.value, values, kept, wanted)


def _backward(call: Call, saved: Saved, dy: jax.Array | SymbolicZero) -> tuple[Any, dict[str, Any]]:
    d = {} if isinstance(dy, SymbolicZero) else _gradients(call, saved, dy)
    return d.get("x"), {name: d.get(name) for name in saved.w}


def _gradients(call: Call, saved: Saved, dy: jax.Array) -> dict[str, jax.Array]:
    """The gradient of every operand that needs one."""
    primals, wanted = {"x": saved.x, **saved.w}, marked(saved.wanted)
    # Without the barrier XLA merges the recomputation outside the loop, and the casts, with those of forward, and
    # keeps their results alive in between.
    x, dy, w = lax.optimization_barrier((saved.x, dy, saved.w))
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    acc = wide(x.dtype)

    def shard(start: Any, tokens: int, carry: dict[str, jax.Array], kept: bool) -> dict[str, jax.Array]:
        x_shard, dy_shard = _rows(x, start, tokens), _rows(dy, start, tokens)
        if kept:
            pre = {name: _rows(value, start - call.kept_start, tokens) for name, value in saved.kept.items()}
        else:
            pre = gate_and_up(x_shard, cast, call.kernels)
        d = gradients(x_shard, dy_shard, pre, cast, call.activation, wanted, call.kernels, sums=carry)
        return {name: _set_rows(carry["x"], d["x"], start, 0) if name == "x" else d[name] for name in carry}

    def zeros(name: str) -> jax.Array:
        shape = primals[name].shape
        start = jnp.zeros(shape, x.dtype) if name == "x" else jnp.zeros(sum_shape(name, shape, call.kernels), acc)
        return vary_like(start, x, dy, *w.values())

    recomputed, kept = (Body(partial(shard, kept=kept), _after_all) for kept in (False, True))
    carry = {name: zeros(name) for name in wanted}
    # Rows of x's gradient are independent of each other: without sums the order is that of any call.
    order = call.token_order and set(wanted) != {"x"}
    carry = for_each_shard(call.plan, call.kept_start, recomputed, kept, carry, token_order=order)
    totals = {name: of_sum(value, primals[name].shape) for name, value in carry.items()}
    # The types of the saved operands: the barrier may have joined those of its own.
    return {name: gradient_of(primals[name], value) for name, value in totals.items()}


def _after_all(start: jax.Array, carry: Any) -> Any:
    return lax.optimization_barrier((start, carry))


_mlp.defvjp(_forward_saving, _backward, symbolic_zeros=True)
# Called outside of any jit too, forward and backward are one compiled program each.
run = jax.jit(_mlp, static_argnums=0)

"""The MLP over tokens and columns that are split over the same mesh axis, as a differentiable function of [T / R, H] rows.

`custom_vjp` as in `functional/mlp_vjp.py`, of gathered shards: each is gathered while the one before computes. In forward
the sum of y over devices may go around a ring beside the products it is made of (`gathering.RING_BACKENDS`); in backward
that of dx has the products of the weight gradients to hide behind.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.functional.gathering import TokenAxis, for_each_gathered
from tiled_jax.functional.loops import Body, gradient_of, vary_over, varying, varying_of
from tiled_jax.functional.mlp_vjp import Saved
from tiled_jax.functional.shard_math import Kernels, gate_and_up, gradients, hidden, hidden_and_pre, product, wide
from tiled_jax.functional.wanted import mark, marked, perturbed

NAME = "tensor_parallel_mlp"

Arrays = dict[str, jax.Array]

_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that is static about one call. `plan` and `kept_start` are of a device's own tokens."""

    plan: ShardPlan
    kept_start: int
    activation: str
    axis: TokenAxis
    kernels: Kernels | None = None  # None computes with XLA alone


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(call: Call, x: jax.Array, w: Arrays) -> jax.Array:
    return _forward(call, x, w, keep=False)[0]


def _forward(call: Call, x: jax.Array, w: Arrays, *, keep: bool) -> tuple[jax.Array, Arrays]:
    """y [T / R, H_out] of a device's own tokens, and with `keep` the pre-activations of the kept gathered shards."""
    plan, axis, kept_start, kernels = call.plan, call.axis, call.kept_start, call.kernels
    backends.record_run(NAME, "xla" if kernels is None else "pallas")
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    kept_tokens = plan.tokens - kept_start if keep else 0
    axes = _axes(call, x, w)

    def zeros(tokens: int, size: int) -> jax.Array:
        return vary_over(jnp.zeros((tokens, size), x.dtype), axes)

    def with_rows(y: jax.Array, h: jax.Array, start: Any) -> jax.Array:
        own = axis.scatter_product(h, lambda h: product(h, cast["w_down"], (1, 0), wide(x.dtype)), x.dtype)
        if "b_down" in cast:
            own = (own.astype(wide(x.dtype)) + cast["b_down"].astype(wide(x.dtype))).astype(x.dtype)
        return _set_rows(y, vary_over(own, axes), start, 0)

    def recomputed(start: Any, tokens: int, state: Any) -> Any:
        x_shard, (y, buffers) = state
        return with_rows(y, hidden(x_shard, cast, call.activation, kernels), start), buffers

    def kept(start: Any, tokens: int, state: Any) -> Any:
        x_shard, (y, buffers) = state
        h, pre = hidden_and_pre(x_shard, cast, call.activation, kernels)
        first = (start - kept_start) * axis.ranks
        buffers = {name: _set_rows(buffers[name], vary_over(pre[name], axes), first, 0) for name in pre}
        return with_rows(y, h, start), buffers

    def after_y(ahead: Any, carry: Any) -> Any:
        ahead, y = lax.optimization_barrier((ahead, carry[0]))
        return ahead, (y, carry[1])

    def after_buffers(ahead: Any, carry: Any) -> Any:
        ahead, buffers = lax.optimization_barrier((ahead, carry[1]))
        return ahead, (carry[0], buffers)

    names = [name for name in ("gate", "up") if f"w_{name}" in w] if kept_tokens else []
    buffers = {name: zeros(kept_tokens * axis.ranks, w["w_up"].shape[1]) for name in names}
    return for_each_gathered(
        plan,
        kept_start if keep else plan.tokens,
        lambda start, tokens: axis.gather(_rows(x, start, tokens)),
        Body(recomputed, after_y),
        Body(kept, after_buffers),
        (zeros(plan.tokens, w["w_down"].shape[1]), buffers),
    )


def _forward_saving(call: Call, x: Any, w: dict[str, Any]) -> tuple[jax.Array, Saved]:
    """The forward under differentiation: every operand comes with whether it needs a gradient."""
    operands = {"x": x, **w}
    wanted = mark(operands, perturbed(operands))
    values = {name: operand.value for name, operand in w.items()}
    y, kept = _forward(call, x.value, values, keep=True)
    return y, Saved(x.value, values, kept, wanted)


def _backward(call: Call, saved: Saved, dy: jax.Array | SymbolicZero) -> tuple[Any, dict[str, Any]]:
    d = {} if isinstance(dy, SymbolicZero) else _gradients(call, saved, dy)
    return d.get("x"), {name: d.get(name) for name in saved.w}


def _gradients(call: Call, saved: Saved, dy: jax.Array) -> Arrays:
    """The gradient of every operand that needs one."""
    primals, wanted, axis = {"x": saved.x, **saved.w}, marked(saved.wanted), call.axis
    # As in `functional/mlp_vjp.py`: what is recomputed must not be merged with forward.
    x, dy, w = lax.optimization_barrier((saved.x, dy, saved.w))
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    acc, axes = wide(x.dtype), _axes(call, x, w) | varying(dy)
    in_loop = [name for name in wanted if name != "b_down"]

    def shard(start: Any, tokens: int, state: Any, kept: bool) -> Arrays:
        (x_shard, dy_shard), carry = state
        if kept:
            first, rows = (start - call.kept_start) * axis.ranks, tokens * axis.ranks
            pre = {name: _rows(value, first, rows) for name, value in saved.kept.items()}
        else:
            pre = gate_and_up(x_shard, cast, call.kernels)
        d = gradients(x_shard, dy_shard, pre, cast, call.activation, in_loop, call.kernels)
        if "x" in d:
            d["x"] = axis.scatter(d["x"])
        d = {name: vary_over(value, axes) for name, value in d.items()}
        return {
            name: _set_rows(carry["x"], d["x"], start, 0) if name == "x" else carry[name] + d[name] for name in carry
        }

    carry = {name: vary_over(jnp.zeros(primals[name].shape, x.dtype if name == "x" else acc), axes) for name in in_loop}
    recomputed, kept = (Body(partial(shard, kept=kept), _after_all) for kept in (False, True))

    def fetch(start: Any, tokens: int) -> Any:
        return axis.gather((_rows(x, start, tokens), _rows(dy, start, tokens)))

    if in_loop:
        carry = for_each_gathered(call.plan, call.kept_start, fetch, recomputed, kept, carry)
    if "b_down" in wanted:  # added to the sums of a device's own tokens
        carry["b_down"] = jnp.sum(dy, axis=0, dtype=acc)
    return {name: gradient_of(primals[name], value) for name, value in carry.items()}


def _axes(call: Call, x: jax.Array, w: Arrays) -> frozenset[str]:
    """The mesh axes along which what is computed varies; the device's own tokens and columns among them."""
    return varying_of([x, *w.values()]) | varying(lax.axis_index(call.axis.name))


def _after_all(ahead: Any, carry: Any) -> Any:
    return lax.optimization_barrier((ahead, carry))


_mlp.defvjp(_forward_saving, _backward, symbolic_zeros=True)
run = jax.jit(_mlp, static_argnums=0)

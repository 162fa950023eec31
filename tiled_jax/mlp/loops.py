"""The loops of one MLP call over the tokens [T, H] that a device has: forward, tangents and backward, of the same plan.

Forward keeps gate and up of the kept shards; backward computes those of the others again, and sums weight gradients in
float32 in the carry of its loop. Tangents, of forward mode, are made a shard at a time as forward is.

Where devices of a mesh axis split the tokens a shard is gathered while the one before computes. In forward the sum of y over
devices may go around a ring beside the products it is made of (`gathered_tokens.RING_BACKENDS`); in backward that of dx has the
products of the weight gradients to hide behind.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.collectives.gathered_tokens import TokenAxis, for_each_gathered
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import Body, for_each_shard, vary_over, varying, varying_of
from tiled_jax.core.own_tokens import Axes, Split
from tiled_jax.core.products import product, wide
from tiled_jax.mlp import shard_tangents
from tiled_jax.mlp.steps import XLA, MLPSteps

Arrays = dict[str, jax.Array]
Results = tuple[Arrays, Arrays]  # of rows, and sums over tokens
PRE = ("gate", "up")  # what a kept shard keeps
OF = "tangent of "  # begins the name of an operand's tangent

_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class MLPCall:
    """All that is static about one call; the plan of forward is the plan of backward.

    Args:
        steps: what computes a shard, XLA or kernels. token_order: sums over shards are made in the order of the tokens, so
            that they do not depend on where shards end.
        tokens: the mesh axis that splits the columns and the tokens, or None; plan is then of a device's own tokens, and a
            shard is gathered.
        split: how a mesh cuts the tokens; None where what is here is this device's own. With it x has its leading dims, and
            every device makes a plan for its own tokens: `replan(tokens, columns)`.
    """

    plan: ShardPlan
    kept_start: int
    activation: str
    steps: MLPSteps = XLA
    token_order: bool = False
    tokens: TokenAxis | None = None
    split: Split | None = None
    replan: Callable[[int, int], ShardPlan] | None = None

    @property
    def kept_tokens(self) -> int:
        return self.plan.tokens - self.kept_start

    def on_device(self, tokens: int, kept_tokens: int, columns: int) -> "MLPCall":
        """Return the call of a device that has so many tokens and columns, and room to keep gate and up of so many tokens."""
        if self.split is None or self.replan is None:
            return self
        plan = self.plan if tokens == self.plan.tokens else self.replan(tokens, columns)
        t = plan.shard_tokens
        return replace(self, plan=plan, kept_start=min(tokens, -(-(tokens - kept_tokens) // t) * t))

    def gathered(self, tokens: Any) -> Any:
        """Return how many rows so many of a device's own tokens are once gathered."""
        return tokens if self.tokens is None else tokens * self.tokens.ranks

    def cut(self, rows: Any, start: Any, tokens: int, state: Any) -> tuple[Any, Any]:
        """Return what the shard has of `rows`, a pytree of [T, ...], and the carry, from the state of `each_of`'s loop."""
        return (_cut(rows, start, tokens), state) if self.tokens is None else state

    def each_of(self, rows: Any, *, token_order: bool = False) -> Callable[..., Any]:
        """Return the loop over shards: (plan, kept_start, recomputed, kept, carry) -> carry. Where devices split the tokens
        the state of a body has the gathered `rows` of the shard before the carry."""
        if self.tokens is None:
            return partial(for_each_shard, token_order=token_order)
        gather = self.tokens.gather
        return partial(for_each_gathered, fetch=lambda start, tokens: gather(_cut(rows, start, tokens)))


def forward(call: MLPCall, share: Fraction | int, rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """y [T, H_out], and for a `share` of the tokens other than 0 gate and up of the kept shards in buffers."""
    x, columns = rows["x"], w["w_up"].shape[1]
    kept_tokens = int(x.shape[0] * share)
    call, w = call.on_device(x.shape[0], kept_tokens, columns), _once(w, axes)
    plan, steps, kept_start = call.plan, call.steps, call.kept_start
    backends.record_run("tiled_mlp" if call.tokens is None else "tensor_parallel_mlp", steps.backend)
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    types = _varying(call, x, *w.values())

    def zeros(tokens: int, size: int) -> jax.Array:
        return vary_over(jnp.zeros((tokens, size), x.dtype), types)

    def own_y(h: jax.Array) -> jax.Array:
        if call.tokens is None:
            return steps.linear(h, cast["w_down"], cast.get("b_down"))
        acc = wide(x.dtype)
        y = call.tokens.scatter_product(h, lambda h: product(h, cast["w_down"], (1, 0), acc), x.dtype)
        if "b_down" in cast:
            y = (y.astype(acc) + cast["b_down"].astype(acc)).astype(x.dtype)
        return vary_over(y, types)

    def shard(start: Any, tokens: int, state: Any, keep: bool) -> Any:
        x_shard, (y, buffers) = call.cut(x, start, tokens, state)
        h, pre = steps.hidden(x_shard, cast, call.activation, keep=keep)
        if keep:
            first = call.gathered(start - kept_start)
            buffers = {name: _set_rows(buffers[name], vary_over(pre[name], types), first, 0) for name in pre}
        return _set_rows(y, own_y(h), start, 0), buffers

    def after_y(ahead: Any, carry: Any) -> Any:
        ahead, y = barrier((ahead, carry[0]))
        return ahead, (y, carry[1])

    def after_buffers(ahead: Any, carry: Any) -> Any:
        ahead, buffers = barrier((ahead, carry[1]))
        return ahead, (carry[0], buffers)

    names = [name for name in PRE if f"w_{name}" in w] if kept_tokens else []
    carry = (
        zeros(plan.tokens, w["w_down"].shape[1]),
        {name: zeros(call.gathered(kept_tokens), columns) for name in names},
    )
    loop = call.each_of(x)
    y, buffers = loop(
        plan,
        kept_start if kept_tokens else plan.tokens,
        recomputed=Body(partial(shard, keep=False), after_y),
        kept=Body(partial(shard, keep=True), after_buffers),
        carry=carry,
    )
    return {"y": y, **buffers}, {}


def tangents(call: MLPCall, rows: Arrays, whole: Arrays, axes: Axes) -> Results:
    """Return the tangent of y [T, H_out] from those of some operands, each named as `OF` and the operand's name."""
    x, whole = rows["x"], _once(whole, axes)
    w = {name: a for name, a in whole.items() if not name.startswith(OF)}
    call = call.on_device(x.shape[0], 0, w["w_up"].shape[1])
    t = {name.removeprefix(OF): a.astype(x.dtype) for name, a in (rows | whole).items() if name.startswith(OF)}
    cast = {name: a.astype(x.dtype) for name, a in w.items()}
    types = _varying(call, x, *w.values(), *t.values())
    of_rows = [a for a in (x, t.pop("x", None)) if a is not None]
    # That of a bias which every device has: added to the sums of a device's own tokens.
    of_bias = None if call.tokens is None else t.pop("b_down", None)

    def shard(start: Any, tokens: int, state: Any) -> jax.Array:
        (x_shard, *rest), dy = call.cut(of_rows, start, tokens, state)
        moved = dict(zip(("x",), rest, strict=False)) | t
        own = vary_over(jnp.zeros((tokens, dy.shape[1]), x.dtype), types)
        if moved:
            pre = call.steps.gate_and_up(x_shard, cast)
            own = shard_tangents.tangents(x_shard, pre, cast, call.activation, moved)
            own = own if call.tokens is None else call.tokens.scatter(own)
        if of_bias is not None:
            own = own + of_bias
        return _set_rows(dy, vary_over(own, types), start, 0)

    body = Body(shard, _after_all)
    dy = vary_over(jnp.zeros((call.plan.tokens, w["w_down"].shape[1]), x.dtype), types)
    return {"y": call.each_of(of_rows)(call.plan, call.plan.tokens, recomputed=body, kept=body, carry=dy)}, {}


def backward(call: MLPCall, wanted: tuple[str, ...], rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """Return the gradient of every operand in `wanted`: of x in its dtype, of the others, sums over tokens, in the wide one."""
    x, dy, w = rows["x"], rows["dy"], _once(w, axes)
    kept_pre = {name: rows[name] for name in PRE if name in rows}
    kept_tokens = max((a.shape[0] for a in kept_pre.values()), default=0)
    call = call.on_device(x.shape[0], kept_tokens, w["w_up"].shape[1])
    steps, shapes = call.steps, {"x": x.shape} | {name: a.shape for name, a in w.items()}
    # Without the barrier XLA merges the recomputation outside the loop, and the casts, with those of forward, and
    # keeps their results alive in between.
    x, dy, w = barrier((x, dy, w))
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    types, acc = _varying(call, x, dy, *w.values()), wide(x.dtype)

    def shard(start: Any, tokens: int, state: Any, kept: bool) -> Arrays:
        (x_shard, dy_shard), carry = call.cut((x, dy), start, tokens, state)
        if kept:
            first = call.gathered(start - call.kept_start)
            pre = {name: _rows(value, first, x_shard.shape[0]) for name, value in kept_pre.items()}
        else:
            pre = steps.gate_and_up(x_shard, cast)
        d = steps.gradients(x_shard, dy_shard, pre, cast, call.activation, carry)
        if "x" in d and call.tokens is not None:
            d["x"] = call.tokens.scatter(d["x"])
        d = {name: vary_over(a, types) for name, a in d.items()}
        return {name: _set_rows(carry["x"], d["x"], start, 0) if name == "x" else d[name] for name in carry}

    def zeros(name: str) -> jax.Array:
        x_or_sum = (shapes[name], x.dtype) if name == "x" else (steps.sum_shape(name, shapes[name]), acc)
        return vary_over(jnp.zeros(*x_or_sum), types)

    # Where every device has the bias of y, its gradient is of a device's own tokens.
    carry = {name: zeros(name) for name in wanted if call.tokens is None or name != "b_down"}
    recomputed, kept = (Body(partial(shard, kept=kept), _after_all) for kept in (False, True))
    # Rows of x's gradient are independent of each other: without sums the order is that of any call.
    loop = call.each_of((x, dy), token_order=call.token_order and set(wanted) != {"x"})
    if carry:
        carry = loop(call.plan, call.kept_start, recomputed=recomputed, kept=kept, carry=carry)
    # A sum of several rows has the gradient in each.
    carry = {name: a if a.shape == shapes[name] else a[0] for name, a in carry.items()}
    if "b_down" in wanted and "b_down" not in carry:
        carry["b_down"] = jnp.sum(dy, axis=0, dtype=acc)
    return {name: carry.pop(name) for name in ("x",) if name in carry}, carry


def _once(w: Arrays, axes: Axes) -> Arrays:
    """Return weights of a device of several whose results are summed: the bias of y is on the first of them."""
    first = [name for name in w if axes and name.endswith("b_down")]
    return w | {name: jnp.where(lax.axis_index(axes) == 0, w[name], jnp.zeros_like(w[name])) for name in first}


def _varying(call: MLPCall, *arrays: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which what is computed of these varies; the one that splits the tokens among them."""
    own = frozenset() if call.tokens is None else varying(lax.axis_index(call.tokens.name))
    return varying_of(arrays) | own


def _cut(rows: Any, start: Any, tokens: int) -> Any:
    return jax.tree.map(lambda a: _rows(a, start, tokens), rows)


def _after_all(ahead: Any, carry: Any) -> Any:
    return barrier((ahead, carry))

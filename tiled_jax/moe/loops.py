"""The loops of one call over the tokens [T, H] that a device has: forward and backward, of the same plan.

A shard chooses its experts, sorts its pairs of a token and an expert by the latter, and computes these rows (`steps.py`).
Backward computes gate, up and the router again, never down, and sums weight gradients in float32 in the carry of its loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import Body, for_each_shard, vary_over, varying_of
from tiled_jax.core.own_tokens import Axes, Split
from tiled_jax.core.products import product, wide
from tiled_jax.mlp import math as shard_math
from tiled_jax.moe import router
from tiled_jax.moe.routes import Routes, routes_of
from tiled_jax.moe.steps import Products, Steps

Arrays = dict[str, jax.Array]
Results = tuple[Arrays, Arrays]  # of rows, and sums over tokens
EXPERTS = ("w_gate", "w_up", "w_down")
MOE_WEIGHTS = ("w_router", *EXPERTS)
CHOICE = ("index", "share")

_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class MoECall:
    """All that is static about one call; the plan of forward is the plan of backward.

    Args:
        logits: whether the router's are a result.
        split: how a mesh cuts the tokens; None where what is here is this device's own. With it x has its leading dims, and
            every device makes a plan for its own tokens: `replan(tokens)`.
    """

    plan: ShardPlan
    top_k: int
    scoring: str
    normalize: bool
    activation: str
    logits: bool
    steps: Steps
    split: Split | None = None
    replan: Callable[[int], ShardPlan] | None = None

    def on_device(self, tokens: int) -> "MoECall":
        """Return the call of a device that has so many tokens."""
        known = self.split is None or self.replan is None or tokens == self.plan.tokens
        return self if known or self.replan is None else replace(self, plan=self.replan(tokens))


def forward(call: MoECall, one_by_one: bool, rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """y [T, H], the experts of every token and what they count, both [T, k], and, where asked for, the logits [T, E].

    one_by_one: a shard waits for the one before where XLA might run two at once. Not where JAX derives tangents of the loop:
    under `shard_map` those of the numbers of experts that wait have no type.
    """
    x, call = rows["x"], call.on_device(rows["x"].shape[0])
    backends.record_run("tiled_moe", "xla")
    cast, acc = {name: a.astype(x.dtype) for name, a in w.items()}, wide(x.dtype)
    types = varying_of([x, *w.values()])
    experts, tokens = w["w_router"].shape[1], x.shape[0]

    def shard(start: Any, t: int, found: Arrays) -> Arrays:
        x_shard = _rows(x, start, t)
        logits = product(x_shard, cast["w_router"], (1, 0), acc)
        choice = router.choice_of(logits, call.top_k, call.scoring, call.normalize)

        def add(pairs: jax.Array, of: jax.Array, products: Products, y: jax.Array) -> jax.Array:
            pre = _pre(_taken(x_shard, of), cast, products)
            h = shard_math.activated(pre, call.activation)
            part = products.product(h, cast["w_down"], 0, acc) * _taken(choice.share.reshape(-1), pairs)[:, None]
            return vary_over(y.at[of].add(part, mode="drop"), types)

        y = vary_over(jnp.zeros(x_shard.shape, acc), types)
        y = call.steps.each(_routes(call, choice.index, experts), add, y)
        own = {"y": y.astype(x.dtype), "index": choice.index, "share": choice.share, "logits": logits}
        return {name: _set_rows(a, vary_over(own[name], types), start, 0) for name, a in found.items()}

    forms: dict[str, Any] = {"y": (x.shape, x.dtype)}
    forms |= {"index": ((tokens, call.top_k), jnp.int32), "share": ((tokens, call.top_k), acc)}
    forms |= {"logits": ((tokens, experts), acc)} if call.logits else {}
    found = {name: vary_over(jnp.zeros(*form), types) for name, form in forms.items()}
    body = Body(shard, _after if one_by_one else lambda ahead, carry: (ahead, carry))
    return for_each_shard(call.plan, call.plan.tokens, recomputed=body, kept=body, carry=found), {}


def backward(call: MoECall, wanted: tuple[str, ...], rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """Return the gradient of every operand in `wanted`: of x in its dtype, of the others, sums over tokens, in the wide one.

    rows: x, the choice, and dy, dlogits or both.
    """
    shapes = {"x": rows["x"].shape} | {name: a.shape for name, a in w.items()}
    # Without the barrier XLA merges the recomputation outside the loop, and the casts, with those of forward.
    rows, w = barrier((rows, w))
    x, call = rows["x"], call.on_device(rows["x"].shape[0])
    cast, acc = {name: a.astype(x.dtype) for name, a in w.items()}, wide(x.dtype)
    types = varying_of([*rows.values(), *w.values()])

    def zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return vary_over(jnp.zeros(shape, dtype), types)

    def shard(start: Any, t: int, carry: Arrays) -> Arrays:
        own = {name: _rows(a, start, t) for name, a in rows.items()}
        sums = {name: carry[name] for name in EXPERTS if name in carry}
        of_share = zeros((t, call.top_k), acc)
        if "x" in carry:
            sums["x"] = zeros(own["x"].shape, acc)
        if "dy" in own:
            sums, of_share = _of_experts(call, own, cast, sums, of_share, types)
        if "x" in carry or "w_router" in carry:
            d = _of_logits(call, own, cast["w_router"], of_share).astype(x.dtype)
            if "x" in carry:
                sums["x"] = sums["x"] + product(d, cast["w_router"], (1, 1), acc)
            if "w_router" in carry:
                sums["w_router"] = shard_math.added(carry["w_router"], own["x"], d)
        of_x = {"x": sums["x"].astype(x.dtype)} if "x" in carry else {}
        found = {name: vary_over(a, types) for name, a in (sums | of_x).items()}
        return {name: _set_rows(carry["x"], found["x"], start, 0) if name == "x" else found[name] for name in carry}

    carry = {name: zeros(shapes[name], x.dtype if name == "x" else acc) for name in wanted}
    body = Body(shard, _after)
    carry = for_each_shard(call.plan, call.plan.tokens, recomputed=body, kept=body, carry=carry)
    return {name: carry.pop(name) for name in ("x",) if name in carry}, carry


def _of_experts(
    call: MoECall, own: Arrays, w: Arrays, sums: Arrays, of_share: jax.Array, types: frozenset[str]
) -> tuple[Arrays, jax.Array]:
    """Return the sums with what the experts add in one shard, and the gradient of what each of them counts [t, k]."""
    x, dy, share = own["x"], own["dy"], own["share"].reshape(-1)
    acc, form = of_share.dtype, of_share.shape

    def add(pairs: jax.Array, of: jax.Array, products: Products, carry: tuple[Arrays, jax.Array]) -> Any:
        sums, of_share = carry
        taken, upstream, weight = _taken(x, of), _taken(dy, of), _taken(share, pairs)[:, None]
        pre = _pre(taken, w, products)
        of_h = products.product(upstream, w["w_down"], 1, acc)  # of what the expert returns, before its weight
        h, d = shard_math.activation_gradients((of_h * weight).astype(x.dtype), pre, call.activation)
        of_share = of_share.at[pairs].set(jnp.sum(of_h * h.astype(acc), axis=-1), mode="drop")
        weighed = (h.astype(acc) * weight).astype(x.dtype)
        parts = {"w_down": (weighed, upstream), "w_gate": (taken, d["gate"]), "w_up": (taken, d["up"])}
        found = {name: products.added(sums[name], *parts[name]) for name in EXPERTS if name in sums}
        if "x" in sums:
            part = products.product(d["gate"], w["w_gate"], 1, acc) + products.product(d["up"], w["w_up"], 1, acc)
            found["x"] = sums["x"].at[of].add(part, mode="drop")
        found = {name: vary_over(a, types) for name, a in found.items()}
        return found, vary_over(of_share, types)

    routes = _routes(call, own["index"], w["w_router"].shape[1])
    sums, of_share = call.steps.each(routes, add, (sums, of_share.reshape(-1)))
    return sums, of_share.reshape(form)


def _of_logits(call: MoECall, own: Arrays, w_router: jax.Array, of_share: jax.Array) -> jax.Array:
    """Return the gradient of the logits of one shard, from those of what experts count and of the logits as a result."""
    parts = [own["dlogits"]] if "dlogits" in own else []
    if "dy" in own:
        logits = product(own["x"], w_router, (1, 0), of_share.dtype)
        parts.append(router.logit_gradients(logits, own["index"], of_share, call.scoring, call.normalize))
    return sum(parts[1:], parts[0])


def _routes(call: MoECall, index: jax.Array, experts: int) -> Routes:
    return routes_of(index, experts, call.steps.rows(index.size, experts))


def _pre(x: jax.Array, w: Arrays, products: Products) -> Arrays:
    """Return gate and up of some rows."""
    return {name: products.product(x, w[f"w_{name}"], 0, x.dtype) for name in ("gate", "up")}


def _taken(a: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a, zeros for the number behind the last one."""
    return a.at[rows].get(mode="fill", fill_value=0)


def _after(ahead: Any, carry: Any) -> Any:
    return barrier((ahead, carry))

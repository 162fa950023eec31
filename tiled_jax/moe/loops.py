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
        logits: whether the router's are a result. rounded: whether they are rounded to the dtype of x.
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
    rounded: bool = False

    def logits_of(self, x: jax.Array, w_router: jax.Array) -> jax.Array:
        """Return the router's logits [t, E] in the wide dtype."""
        acc = wide(x.dtype)
        return product(x, w_router, (1, 0), x.dtype if self.rounded else acc).astype(acc)

    def choice_of(self, logits: jax.Array) -> router.Choice:
        """Return the experts of every token and what each of them counts, both [t, k]."""
        return router.choice_of(logits, self.top_k, self.scoring, self.normalize)

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
    types, tokens, experts = varying_of([x, *w.values()]), x.shape[0], w["w_router"].shape[1]

    def shard(start: Any, t: int, found: Arrays) -> Arrays:
        own = shard_forward(call, _rows(x, start, t), cast, types)
        own["y"] = own["y"].astype(x.dtype)
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

    def shard(start: Any, t: int, carry: Arrays) -> Arrays:
        own = {name: _rows(a, start, t) for name, a in rows.items()}
        found = shard_backward(call, own, cast, carry, types)
        if "x" in found:
            found["x"] = _set_rows(carry["x"], found["x"].astype(x.dtype), start, 0)
        return {name: found[name] for name in carry}

    carry = {name: vary_over(jnp.zeros(shapes[name], x.dtype if name == "x" else acc), types) for name in wanted}
    body = Body(shard, _after)
    carry = for_each_shard(call.plan, call.plan.tokens, recomputed=body, kept=body, carry=carry)
    return {name: carry.pop(name) for name in ("x",) if name in carry}, carry


def shard_forward(call: MoECall, x: jax.Array, w: Arrays, types: frozenset[str]) -> Arrays:
    """Return y [t, H] of one shard in the wide dtype, the choice, and the router's logits.

    w: the weights in the dtype of x. types: the mesh axes along which results vary.
    """
    acc = wide(x.dtype)
    logits = call.logits_of(x, w["w_router"])
    choice = call.choice_of(logits)

    def add(pairs: jax.Array, of: jax.Array, products: Products, y: jax.Array) -> jax.Array:
        pre = _pre(_taken(x, of), w, products)
        h = shard_math.activated(pre, call.activation)
        part = products.product(h, w["w_down"], 0, acc) * _taken(choice.share.reshape(-1), pairs)[:, None]
        return vary_over(y.at[of].add(part, mode="drop"), types)

    y = vary_over(jnp.zeros(x.shape, acc), types)
    y = call.steps.each(_routes(call, choice.index, w["w_router"].shape[1]), add, y)
    return {"y": y, "index": choice.index, "share": choice.share, "logits": logits}


def shard_backward(call: MoECall, own: Arrays, w: Arrays, sums: Arrays, types: frozenset[str]) -> Arrays:
    """Return the sums over tokens with what one shard adds to them, and of x, where it is among them, the shard's gradient.

    own: x, and dy, dlogits or both; the choice where it is kept, else the router is computed once for all that needs it.
    w, types: as in `shard_forward`.
    sums: in the wide dtype by name, those that are wanted.
    """
    x, acc = own["x"], wide(own["x"].dtype)
    if "index" not in own:
        logits = call.logits_of(x, w["w_router"])
        own = own | call.choice_of(logits)._asdict() | {"logits": logits}

    def zeros(shape: tuple[int, ...]) -> jax.Array:
        return vary_over(jnp.zeros(shape, acc), types)

    found = {name: sums[name] for name in EXPERTS if name in sums}
    of_share = zeros((x.shape[0], call.top_k))
    if "x" in sums:
        found["x"] = zeros(x.shape)
    if "dy" in own:
        found, of_share = _of_experts(call, own, w, found, of_share, types)
    if "x" in sums or "w_router" in sums:
        d = _of_logits(call, own, w["w_router"], of_share).astype(x.dtype)
        if "x" in sums:
            found["x"] = found["x"] + product(d, w["w_router"], (1, 1), acc)
        if "w_router" in sums:
            found["w_router"] = shard_math.added(sums["w_router"], x, d)
    return {name: vary_over(a, types) for name, a in found.items()}


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
        logits = own["logits"] if "logits" in own else call.logits_of(own["x"], w_router)
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

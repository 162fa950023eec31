"""The formulas of one shard of a decoder layer: what stands before attention and what stands behind it, and their backward.

Letters: t tokens of the shard, H hidden, A and K the columns of all query heads and of all key heads, d features of a head.
`w` has the matrices and biases by name in the dtype of the products, and the scales of the norms, `s_*`, as they are.
Rows of the residual stream, x, keep their own dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiled_jax.core.loops import vary_like, varying_of
from tiled_jax.core.products import product_of_rows, wide
from tiled_jax.mlp.projections import ORDER
from tiled_jax.mlp.steps import MLPSteps
from tiled_jax.models.block.adapters import adapter_gradients, input_gradient, projected, with_adapter
from tiled_jax.models.block.params import QKV
from tiled_jax.models.block.ranks import ONE_DEVICE, Here
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.rope import rotate, turned_by
from tiled_jax.moe.loops import MoECall, shard_backward, shard_forward

Arrays = dict[str, jax.Array]
Norm = Callable[[jax.Array, jax.Array], jax.Array]  # of rows and a scale
TURNS = "turns"  # how positions turn each pair of features: see `models.rope.turning`
# What stands before attention. s_q and s_k: of a model that has them, the scales of the norms of heads, [d].
BEFORE_ATTENTION = ("s_attention", "s_q", "s_k", *(f"{kind}_{name}" for kind in "wblr" for name in QKV))
MLP = ("w_router", *(f"{kind}_{name}" for kind in "wblr" for name in ORDER))


@dataclass(frozen=True)
class LayerSteps:
    """Compute what one shard goes through, and its derivatives. Static.

    experts: of a layer that has them in place of one MLP. Devices do not split them.
    """

    config: LlamaConfig
    dtype: np.dtype
    mlp: MLPSteps
    ranks: Here = ONE_DEVICE
    experts: MoECall | None = None

    def before(self, x: jax.Array, positions: jax.Array, w: Mapping[str, jax.Array]) -> Arrays:
        """Return q [t, A], k and v [t, K], q and k turned, from x [t, H] and positions [t]; R t of them where gathered."""
        rows = self.ranks.enter(self._norm(x, w["s_attention"]).astype(self.dtype))
        found = {name: projected(rows, w, name) for name in QKV}
        found = {name: self._of_heads(a, w.get(f"s_{name}")) for name, a in found.items()}
        return {name: a if name == "v" else self._turned(a, positions, w[TURNS], 1) for name, a in found.items()}

    def before_gradients(
        self, x: jax.Array, positions: jax.Array, d: Arrays, w: Mapping[str, jax.Array], sums: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Arrays]:
        """Return what q, k and v add to the gradient of x, and the sums with this shard's part. d: of q, k and v.

        Where q and k are normed their products are made again, as the norm's gradient needs them. Where devices have columns
        and all tokens, both are of this device's columns.
        """
        rows, pull = jax.vjp(self._norm, x, _own(w["s_attention"], x))
        rows, acc = self.ranks.enter(rows.astype(self.dtype)), wide(self.dtype)
        d = {name: a.astype(self.dtype) for name, a in d.items()}
        d = {name: a if name == "v" else self._turned(a, positions, w[TURNS], -1) for name, a in d.items()}
        scales = {}
        for name in (name for name in QKV if f"s_{name}" in w):
            raw = projected(rows, w, name)
            d[name], scales[f"s_{name}"] = jax.vjp(self._of_heads, raw, _own(w[f"s_{name}"], raw))[1](d[name])
        of_q, of_k, of_v = (input_gradient(d[name], w, name, acc) for name in QKV)
        of_rows = (of_q + of_k + of_v).astype(self.dtype)
        of_rows = self.ranks.leave(of_rows) if self.ranks.gathered > 1 else of_rows
        dx, d_scale = pull(of_rows.astype(wide(x.dtype)))
        return dx, self._added(sums, w, {name: (rows, d[name]) for name in QKV}, scales | {"s_attention": d_scale})

    def behind(self, x: jax.Array, a: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return the layer's result [t, H] from x and attention's output a [t, A].

        Where devices have columns and all tokens, one part of it: the sum over the devices is the result.
        """
        x = x + _branch(self._norm, self._projected(a, w), w.get("s_attention_out")).astype(x.dtype)
        rows = self.ranks.enter(self._norm(x, w["s_mlp"]).astype(self.dtype))
        if not self.ranks.split or "s_mlp_out" in w:
            y = x + _branch(self._norm, self._mlp(rows, w), w.get("s_mlp_out")).astype(x.dtype)
            return self.ranks.once(y)
        y = self._down_product(self._hidden(rows, w), w).astype(self.dtype)
        y = self.ranks.leave(y) if self.ranks.gathered > 1 else y
        return self.ranks.once(_plus(x, w.get("b_down"))) + y.astype(x.dtype)

    def behind_gradients(
        self, x: jax.Array, a: jax.Array, dy: jax.Array, w: Mapping[str, jax.Array], sums: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        """Return the gradient of x + attention's projection, that of a, sum(a da) of each head [t, heads], and the sums.

        The down product is computed again only where a norm follows it, whose gradient needs it.
        """
        split = self.ranks.split
        branch, pull_attention = _pulled(self._norm, self._projected(a, w), w.get("s_attention_out"))
        x = x + branch.astype(x.dtype)
        rows, pull = jax.vjp(self._norm, x, _own(w["s_mlp"], x))
        rows, ups = self.ranks.enter(rows.astype(self.dtype)), _of_mlp(w)
        alone = ("b_down",) if split else ()  # of this device's rows
        of_mlp = {name: sums[name] for name in sums if name in MLP and name not in alone} | {"x": rows}
        pre = self.mlp.gate_and_up(rows, ups) if self.experts is None else {}
        of_down, of_norms = dy, {}
        if "s_mlp_out" in w:
            y = self._down(self.mlp.activated(pre, self.config.activation), w) if pre else self._mlp(rows, w)
            of_down, of_norms["s_mlp_out"] = _pulled(self._norm, y, w["s_mlp_out"])[1](dy)
        of_down = of_down.astype(self.dtype)
        upstream = self.ranks.enter(of_down)
        if self.experts is None:
            found = self.mlp.gradients(rows, upstream, pre, ups, self.config.activation, of_mlp)
        else:
            own, types = {"x": rows, "dy": upstream}, varying_of([rows, upstream, *ups.values()])
            found = shard_backward(self.experts, own, ups, of_mlp, types)
        of_x, d_scale = pull(self.ranks.leave(found.pop("x")).astype(wide(x.dtype)))
        dx = dy + of_x
        own, of_norms["s_attention_out"] = pull_attention(dx)
        own = own.astype(self.dtype)
        d_out = self.ranks.enter(own)
        da = input_gradient(d_out, w, "o", self.dtype)
        by_head = (a.astype(wide(a.dtype)) * da.astype(wide(a.dtype))).reshape(a.shape[0], -1, self.config.head_dim)
        of_norms["s_mlp"] = d_scale
        others = {name: self.ranks.once(d) for name, d in of_norms.items() if name in w}
        if split:
            sums_of_rows = {"b_o": own, "b_down": of_down}
            others |= {name: self.ranks.once(_over_rows(d)) for name, d in sums_of_rows.items()}
        rest = {name: total for name, total in sums.items() if name not in found}
        return (
            self.ranks.once(dx),
            da,
            jnp.sum(by_head, axis=-1),
            found | self._added(rest, w, {"o": (a, d_out)}, others),
        )

    def _projected(self, a: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return what attention returns, of this device's rows."""
        if not self.ranks.split:
            return projected(a, w, "o")
        return _plus(self.ranks.leave(projected(a, w, "o", bias=False)), w.get("b_o"))

    def _mlp(self, rows: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return what the MLP, or the experts, make of normed rows, of this device's rows."""
        if self.experts is None:
            return self._down(self._hidden(rows, w), w)
        ups = _of_mlp(w)
        return shard_forward(self.experts, rows, ups, varying_of([rows, *ups.values()]))["y"].astype(self.dtype)

    def _hidden(self, rows: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        return self.mlp.hidden(rows, _of_mlp(w), self.config.activation)[0]

    def _down(self, h: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return what the MLP returns, of this device's rows."""
        if not self.ranks.split:
            return with_adapter(self.mlp.linear(h, w["w_down"], w.get("b_down")), h, w, "down")
        return _plus(self.ranks.leave(self._down_product(h, w).astype(self.dtype)), w.get("b_down"))

    def _down_product(self, h: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return this device's part of a sum over devices, without a bias."""
        return with_adapter(self.mlp.linear(h, w["w_down"], None), h, w, "down")

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(wide(x.dtype))
        size = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.config.rms_norm_eps)
        scale = scale.astype(x.dtype)
        return x * (size * (scale + self.config.norm_offset if self.config.norm_offset else scale))

    def _of_heads(self, a: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Return a [t, heads d] with every head normed by itself; scale: [d], None: as it is."""
        if scale is None:
            return a
        return self._norm(a.reshape(a.shape[0], -1, self.config.head_dim), scale).astype(a.dtype).reshape(a.shape)

    def _turned(self, a: jax.Array, positions: jax.Array, turns: jax.Array, way: int) -> jax.Array:
        """Return a [t, heads d] with every head turned by the angle of its position, or turned back, which is the transpose."""
        cos, sin = turned_by(turns, positions)
        return rotate(a.reshape(1, a.shape[0], -1, self.config.head_dim), cos, way * sin).reshape(a.shape)

    def _added(
        self,
        sums: Mapping[str, jax.Array],
        w: Mapping[str, jax.Array],
        linears: Mapping[str, tuple[jax.Array, jax.Array]],
        others: Arrays,
    ) -> Arrays:
        """The sums with the gradients of some projections, by (input, gradient of the output), and of others."""
        parts = {name: d.astype(sums[name].dtype) for name, d in others.items() if name in sums}
        for name, (rows, d) in linears.items():
            if f"w_{name}" in sums:
                parts[f"w_{name}"] = product_of_rows(rows, d, wide(d.dtype))
            if f"b_{name}" in sums and f"b_{name}" not in parts:
                parts[f"b_{name}"] = _over_rows(d)
            parts |= adapter_gradients(rows, d, w, name, sums)
        return {name: sums[name] + part for name, part in parts.items()}


def _branch(norm: Norm, y: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return what is added of a branch's result y: it itself, or its norm where that has a scale."""
    return y if scale is None else norm(y, scale)


def _pulled(norm: Norm, y: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """Return `_branch`, and the function of its gradient that returns those of y and of the scale."""
    if scale is None:
        return y, lambda d: (d, None)
    found, pull = jax.vjp(norm, y, _own(scale, y))
    return found, lambda d: pull(d.astype(found.dtype))


def _of_mlp(w: Mapping[str, jax.Array]) -> Arrays:
    return {name: w[name] for name in MLP if name in w}


def _own(scale: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the scale of a norm as its rows are typed, so that its gradient is of this device's alone, and is added up once.

    It is summed over shards in this dtype, and so is not rounded for each.
    """
    return vary_like(scale.astype(wide(scale.dtype)), rows)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y with a bias, which is added where the sum over the devices is whole."""
    return y if bias is None else (y.astype(wide(y.dtype)) + bias.astype(wide(y.dtype))).astype(y.dtype)


def _over_rows(d: jax.Array) -> jax.Array:
    return jnp.sum(d, axis=0, dtype=wide(d.dtype))

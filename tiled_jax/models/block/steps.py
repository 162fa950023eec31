"""The formulas of one shard of a decoder layer: what stands before attention and what stands behind it, and their backward.

Letters: t tokens of the shard, H hidden, A and K the columns of all query heads and of all key heads, d features of a head.
`w` has the matrices and biases by name in the dtype of the products, and the scales of the norms, `s_*`, as they are.
Rows of the residual stream, x, keep their own dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiled_jax.core.products import linear, product, product_of_rows, wide
from tiled_jax.mlp.steps import MLPSteps
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.rope import rotate

Arrays = dict[str, jax.Array]
QKV = ("q", "k", "v")
FREQUENCIES = "frequencies"  # radians per token of each pair of features
ATTENTION = ("s_attention", *(f"{kind}_{name}" for kind in "wb" for name in QKV))  # what stands before attention
MLP = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


@dataclass(frozen=True)
class LayerSteps:
    """Compute what one shard goes through, and its derivatives. Static."""

    config: LlamaConfig
    dtype: np.dtype
    mlp: MLPSteps

    def before(self, x: jax.Array, positions: jax.Array, w: Mapping[str, jax.Array]) -> Arrays:
        """Return q [t, A], k and v [t, K], q and k turned, from x [t, H] and positions [t]."""
        rows = self._norm(x, w["s_attention"]).astype(self.dtype)
        found = {name: linear(rows, w[f"w_{name}"], w.get(f"b_{name}")) for name in QKV}
        return {name: a if name == "v" else self._turned(a, positions, w[FREQUENCIES], 1) for name, a in found.items()}

    def before_gradients(
        self, x: jax.Array, positions: jax.Array, d: Arrays, w: Mapping[str, jax.Array], sums: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Arrays]:
        """Return what q, k and v add to the gradient of x, and the sums with this shard's part. d: of q, k and v."""
        rows, pull = jax.vjp(self._norm, x, w["s_attention"])
        rows, acc = rows.astype(self.dtype), wide(self.dtype)
        d = {name: a.astype(self.dtype) for name, a in d.items()}
        d = {name: a if name == "v" else self._turned(a, positions, w[FREQUENCIES], -1) for name, a in d.items()}
        of_q, of_k, of_v = (product(d[name], w[f"w_{name}"], (1, 1), acc) for name in QKV)
        of_rows = of_q + of_k + of_v
        dx, d_scale = pull(of_rows.astype(self.dtype).astype(wide(x.dtype)))
        return dx, self._added(sums, {name: (rows, d[name]) for name in QKV}, {"s_attention": d_scale})

    def behind(self, x: jax.Array, a: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Return the layer's result [t, H] from x and attention's output a [t, A]."""
        x = self._middle(x, a, w)
        rows = self._norm(x, w["s_mlp"]).astype(self.dtype)
        h, _ = self.mlp.hidden(rows, _of_mlp(w), self.config.activation)
        return x + self.mlp.linear(h, w["w_down"], w.get("b_down")).astype(x.dtype)

    def behind_gradients(
        self, x: jax.Array, a: jax.Array, dy: jax.Array, w: Mapping[str, jax.Array], sums: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
        """Return the gradient of x + attention's projection, that of a, sum(a da) of each head [t, heads], and the sums.

        The down product is not computed again.
        """
        rows, pull = jax.vjp(self._norm, self._middle(x, a, w), w["s_mlp"])
        rows, ups = rows.astype(self.dtype), _of_mlp(w)
        of_mlp = {name: sums[name] for name in sums if name in MLP} | {"x": rows}
        pre = self.mlp.gate_and_up(rows, ups)
        found = self.mlp.gradients(rows, dy.astype(self.dtype), pre, ups, self.config.activation, of_mlp)
        of_x, d_scale = pull(found.pop("x").astype(wide(x.dtype)))
        dx = dy + of_x
        d_out = dx.astype(self.dtype)
        da = product(d_out, w["w_o"], (1, 1), self.dtype)
        by_head = (a.astype(wide(a.dtype)) * da.astype(wide(a.dtype))).reshape(a.shape[0], -1, self.config.head_dim)
        rest = {name: total for name, total in sums.items() if name not in found}
        return dx, da, jnp.sum(by_head, axis=-1), found | self._added(rest, {"o": (a, d_out)}, {"s_mlp": d_scale})

    def _middle(self, x: jax.Array, a: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        return x + linear(a, w["w_o"], w.get("b_o")).astype(x.dtype)

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(wide(x.dtype))
        size = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x * (size * scale.astype(x.dtype))

    def _turned(self, a: jax.Array, positions: jax.Array, frequencies: jax.Array, way: int) -> jax.Array:
        """a [t, heads d] with every head turned by the angle of its position, or turned back, which is the transpose."""
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        factor = self.config.rope.attention_factor
        cos, sin = factor * jnp.cos(angles), way * factor * jnp.sin(angles)
        return rotate(a.reshape(1, a.shape[0], -1, self.config.head_dim), cos, sin).reshape(a.shape)

    def _added(
        self, sums: Mapping[str, jax.Array], linears: Mapping[str, tuple[jax.Array, jax.Array]], others: Arrays
    ) -> Arrays:
        """The sums with the gradients of some linear layers, by (input, gradient of the output), and of others."""
        parts = {name: d.astype(sums[name].dtype) for name, d in others.items() if name in sums}
        for name, (rows, d) in linears.items():
            if f"w_{name}" in sums:
                parts[f"w_{name}"] = product_of_rows(rows, d, wide(d.dtype))
            if f"b_{name}" in sums:
                parts[f"b_{name}"] = jnp.sum(d, axis=0, dtype=wide(d.dtype))
        return {name: sums[name] + part for name, part in parts.items()}


def _of_mlp(w: Mapping[str, jax.Array]) -> Arrays:
    return {name: w[name] for name in MLP if name in w}

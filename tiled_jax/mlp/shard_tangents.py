"""The tangent of y of one shard of the MLP, for forward mode: the transpose of `MLPSteps.gradients`, term by term."""

from collections.abc import Mapping
from functools import reduce

import jax
import jax.numpy as jnp

from tiled_jax.core.activations import activate
from tiled_jax.core.products import product, wide

ArrayMap = Mapping[str, jax.Array]


def tangents(x: jax.Array, pre: ArrayMap, w: ArrayMap, activation: str, t: ArrayMap) -> jax.Array:
    """Return the tangent [t, H_out] of y from those of x, weights and biases by name; `pre`: gate and up, or up alone.

    Products take operands in the dtype of x and accumulate in float32, elementwise work is float32, as in backward.
    """
    acc = wide(x.dtype)

    def moved(name: str, rows: jax.Array, of_rows: jax.Array | None) -> jax.Array | None:
        """Return the tangent of rows w + b in the wide dtype; None for zero."""
        parts = [] if of_rows is None else [product(of_rows, w[f"w_{name}"], (1, 0), acc)]
        parts += [product(rows, t[f"w_{name}"], (1, 0), acc)] if f"w_{name}" in t else []
        parts += [t[f"b_{name}"].astype(acc)[None, :]] if f"b_{name}" in t else []
        return reduce(jnp.add, parts) if parts else None

    def of_act(a: jax.Array, of_a: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        if of_a is None:
            return activate(activation, a)[0], None
        return activate(activation, a, of_a)

    up, of_up = pre["up"].astype(acc), moved("up", x, t.get("x"))
    if "gate" in pre:
        act, slope = of_act(pre["gate"].astype(acc), moved("gate", x, t.get("x")))
        terms = [a * b for a, b in ((slope, up), (act, of_up)) if a is not None and b is not None]
        h, of_h = act * up, reduce(jnp.add, terms) if terms else None
    else:
        h, of_h = of_act(up, of_up)
    of_y = moved("down", h.astype(x.dtype), None if of_h is None else of_h.astype(x.dtype))
    assert of_y is not None, "there is a tangent of something"
    return jnp.broadcast_to(of_y, (x.shape[0], w["w_down"].shape[1])).astype(x.dtype)

"""The formulas of one shard of the MLP, forward and backward. No loops, no plans, no kernels.

Letters: t tokens of the shard, H hidden, I intermediate. `w` maps the names w_gate, w_up, w_down [in, out] and b_gate,
b_up, b_down to the operands that exist, all in the dtype of x. Products take that dtype and accumulate in float32;
elementwise work is float32 (float64 for float64). Derived in `shared_specs/README.md`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tiled_jax.core.activations import activate
from tiled_jax.core.products import product, product_of_rows, wide

ArrayMap = Mapping[str, jax.Array]


def activated(pre: ArrayMap, activation: str) -> jax.Array:
    """Return h [t, I] from gate and up, or up alone in a plain MLP."""
    dtype = pre["up"].dtype
    up = pre["up"].astype(wide(dtype))
    h = activate(activation, pre["gate"].astype(up.dtype))[0] * up if "gate" in pre else activate(activation, up)[0]
    return h.astype(dtype)


def activation_gradients(dh: jax.Array, pre: ArrayMap, activation: str) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return h, and dgate (where there is a gate) and dup by name, from dh: all [t, I] in the dtype of x."""
    dtype = dh.dtype
    dh = dh.astype(wide(dtype))
    up = pre["up"].astype(dh.dtype)
    if "gate" not in pre:
        h, dup = activate(activation, up, dh)
        return h.astype(dtype), {"up": dup.astype(dtype)}
    act, dgate = activate(activation, pre["gate"].astype(dh.dtype), dh * up)
    return (act * up).astype(dtype), {"gate": dgate.astype(dtype), "up": (dh * act).astype(dtype)}


def dx(d: ArrayMap, w: ArrayMap) -> jax.Array:
    """Return the gradient of x, from those of gate and up and their weights by the same names."""
    dtype = d["up"].dtype
    parts = [product(d[name], w[name], (1, 1), wide(dtype)) for name in d]
    return (parts[0] + parts[1] if "gate" in d else parts[0]).astype(dtype)


def added(total: jax.Array, rows: jax.Array | None, d: jax.Array) -> jax.Array:
    """Return total + rows^T d, or + the sum of d's rows where `rows` is None, in the wide dtype."""
    acc = wide(d.dtype)
    return total + (jnp.sum(d, axis=0, dtype=acc) if rows is None else product_of_rows(rows, d, acc))

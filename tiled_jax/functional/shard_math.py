"""The formulas of one shard of the MLP, forward and backward. No loops, no plans.

Letters: t tokens of the shard, H hidden, I intermediate. `w` maps the names w_gate, w_up, w_down [in, out] and b_gate,
b_up, b_down to the operands that exist, all in the dtype of x. Products take that dtype and accumulate in float32;
elementwise work is float32 (float64 for float64). Derived in `shared_specs/README.md`.
"""

import math
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
from jax import lax

Weights = Mapping[str, jax.Array]

_SQRT_HALF = math.sqrt(0.5)
_NORMAL_PEAK = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of elementwise work and of sums: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64) if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def activate(activation: str, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(act(a), act'(a)); what the caller does not use is never computed once compiled."""
    match activation:
        case "silu":
            s = jax.nn.sigmoid(a)
            return a * s, s * (1 + a * (1 - s))
        case "gelu":
            cdf = lax.erfc(-_SQRT_HALF * a) / 2
            return a * cdf, cdf + a * jnp.exp(-a * a / 2) * _NORMAL_PEAK
        case "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2u), whose compiled form is the more accurate one
            s = jax.nn.sigmoid(2 * _TANH_SCALE * (a + _TANH_CUBIC * a * a * a))
            return a * s, s * (1 + 2 * _TANH_SCALE * a * (1 - s) * (1 + 3 * _TANH_CUBIC * a * a))
        case "relu":
            return jnp.maximum(a, 0), (a > 0).astype(a.dtype)
        case "relu_squared":
            positive = jnp.maximum(a, 0)
            return positive * positive, 2 * positive
    raise ValueError(f"unknown activation {activation!r}")


def product(a: jax.Array, b: jax.Array, dims: tuple[int, int], out: jnp.dtype) -> jax.Array:
    """Sum over dim dims[0] of a and dims[1] of b, in `out`. float32 means IEEE float32 on every device."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=out)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x @ weight + bias, rounded to the dtype of x once."""
    if bias is None:
        return product(x, weight, (1, 0), x.dtype)
    total = product(x, weight, (1, 0), wide(x.dtype))
    return (total + bias.astype(total.dtype)).astype(x.dtype)


def gate_and_up(x: jax.Array, w: Weights) -> dict[str, jax.Array]:
    """The pre-activations [t, I] that backward needs again: gate and up, or up alone in a plain MLP."""
    return {name: linear(x, w[f"w_{name}"], w.get(f"b_{name}")) for name in ("gate", "up") if f"w_{name}" in w}


def down(pre: Mapping[str, jax.Array], w: Weights, activation: str) -> jax.Array:
    """y [t, H_out] of one shard from its pre-activations."""
    dtype = pre["up"].dtype
    up = pre["up"].astype(wide(dtype))
    h = activate(activation, pre["gate"].astype(up.dtype))[0] * up if "gate" in pre else activate(activation, up)[0]
    return linear(h.astype(dtype), w["w_down"], w.get("b_down"))


def gradients(
    x: jax.Array, dy: jax.Array, pre: Mapping[str, jax.Array], w: Weights, activation: str, wanted: Collection[str]
) -> dict[str, jax.Array]:
    """The gradients of one shard for the operands named in `wanted`: x in its own dtype, the rest in the wide one.

    Every [t, I] value is rounded to the dtype of x before its products: a float32 operand would make them float32
    products, many times slower on a GPU.
    """
    acc = wide(x.dtype)
    h, d = _pre_activation_gradients(dy, pre, w, activation)
    inputs, d = {"gate": x, "up": x, "down": h}, {**d, "down": dy}
    out = {}
    for name, value in d.items():
        if f"w_{name}" in wanted:
            out[f"w_{name}"] = product(inputs[name], value, (0, 0), acc)
        if f"b_{name}" in wanted:
            out[f"b_{name}"] = jnp.sum(value, axis=0, dtype=acc)
    if "x" in wanted:
        parts = [product(d[name], w[f"w_{name}"], (1, 1), acc) for name in pre]
        out["x"] = (parts[0] + parts[1] if "gate" in pre else parts[0]).astype(x.dtype)
    return out


def _pre_activation_gradients(
    dy: jax.Array, pre: Mapping[str, jax.Array], w: Weights, activation: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate and dup by name, all [t, I] in the dtype of x."""
    dtype = dy.dtype
    dh = product(dy, w["w_down"], (1, 1), dtype).astype(wide(dtype))
    up = pre["up"].astype(dh.dtype)
    if "gate" not in pre:
        h, slope = activate(activation, up)
        return h.astype(dtype), {"up": (dh * slope).astype(dtype)}
    act, slope = activate(activation, pre["gate"].astype(dh.dtype))
    return (act * up).astype(dtype), {"gate": (dh * up * slope).astype(dtype), "up": (dh * act).astype(dtype)}

"""The formulas of one shard of the MLP, forward and backward, through XLA or through kernels. No loops, no plans.

Letters: t tokens of the shard, H hidden, I intermediate. `w` maps the names w_gate, w_up, w_down [in, out] and b_gate,
b_up, b_down to the operands that exist, all in the dtype of x. Products take that dtype and accumulate in float32;
elementwise work is float32 (float64 for float64). Derived in `shared_specs/README.md`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Weights = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Kernels:
    """Static: the products around the activation run in Pallas kernels; with `interpret` in JAX's GPU interpreter."""

    interpret: bool


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


def product_of_rows(a: jax.Array, b: jax.Array, out: jnp.dtype) -> jax.Array:
    """a^T b over the rows of both, in `out`.

    On a CPU a is transposed first, as an array of its own: XLA's product over the rows of both takes twice the time there.
    """
    if jax.default_backend() == "cpu":
        return product(lax.optimization_barrier(a.T), b, (1, 0), out)
    return product(a, b, (0, 0), out)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x @ weight + bias, rounded to the dtype of x once."""
    if bias is None:
        return product(x, weight, (1, 0), x.dtype)
    total = product(x, weight, (1, 0), wide(x.dtype))
    return (total + bias.astype(total.dtype)).astype(x.dtype)


def gate_and_up(x: jax.Array, w: Weights, kernels: Kernels | None = None) -> dict[str, jax.Array]:
    """The pre-activations [t, I] that backward needs again: gate and up, or up alone in a plain MLP."""
    if kernels is not None:
        return _through_kernel(_kernel_gate_and_up, gate_and_up, kernels)(x, _up_weights(w))
    return {name: linear(x, w[f"w_{name}"], w.get(f"b_{name}")) for name in ("gate", "up") if f"w_{name}" in w}


def hidden(x: jax.Array, w: Weights, activation: str, kernels: Kernels | None = None) -> jax.Array:
    """h [t, I] of one shard, in the dtype of x."""
    return hidden_and_pre(x, w, activation, kernels, keep=False)[0]


def hidden_and_pre(
    x: jax.Array, w: Weights, activation: str, kernels: Kernels | None = None, *, keep: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h of one shard, and with `keep` the pre-activations it was made from."""

    def formula(x: jax.Array, w: Weights) -> tuple[jax.Array, dict[str, jax.Array]]:
        pre = gate_and_up(x, w)
        return _activated(pre, activation), pre if keep else {}

    if kernels is None:
        return formula(x, w)
    return _through_kernel(_kernel_hidden, formula, kernels, activation=activation, keep=keep)(x, _up_weights(w))


def down(h: jax.Array, w: Weights) -> jax.Array:
    """y [t, H_out] of one shard."""
    return linear(h, w["w_down"], w.get("b_down"))


def _activated(pre: Mapping[str, jax.Array], activation: str) -> jax.Array:
    dtype = pre["up"].dtype
    up = pre["up"].astype(wide(dtype))
    h = activate(activation, pre["gate"].astype(up.dtype))[0] * up if "gate" in pre else activate(activation, up)[0]
    return h.astype(dtype)


def gradients(
    x: jax.Array,
    dy: jax.Array,
    pre: Mapping[str, jax.Array],
    w: Weights,
    activation: str,
    wanted: Collection[str],
    kernels: Kernels | None = None,
) -> dict[str, jax.Array]:
    """The gradients of one shard for the operands named in `wanted`: x in its own dtype, the rest in the wide one.

    Every [t, I] value is rounded to the dtype of x before its products: a float32 operand would make them float32
    products, many times slower on a GPU.
    """
    acc = wide(x.dtype)
    h, d = _pre_activation_gradients(dy, pre, w, activation, kernels if {*wanted} - {"w_down", "b_down"} else None)
    inputs, d = {"gate": x, "up": x, "down": h}, {**d, "down": dy}
    out = {}
    for name, value in d.items():
        if f"w_{name}" in wanted:
            out[f"w_{name}"] = product_of_rows(inputs[name], value, acc)
        if f"b_{name}" in wanted:
            out[f"b_{name}"] = jnp.sum(value, axis=0, dtype=acc)
    if "x" in wanted:
        parts = [product(d[name], w[f"w_{name}"], (1, 1), acc) for name in pre]
        out["x"] = (parts[0] + parts[1] if "gate" in pre else parts[0]).astype(x.dtype)
    return out


def _pre_activation_gradients(
    dy: jax.Array, pre: Mapping[str, jax.Array], w: Weights, activation: str, kernels: Kernels | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate and dup by name, all [t, I] in the dtype of x."""
    if kernels is not None:

        def formula(dy: jax.Array, pre: Mapping[str, jax.Array], w_down: jax.Array) -> Any:
            return _pre_activation_gradients(dy, pre, {"w_down": w_down}, activation)

        return _through_kernel(_kernel_dgated, formula, kernels, activation=activation)(dy, pre, w["w_down"])
    dtype = dy.dtype
    dh = product(dy, w["w_down"], (1, 1), dtype).astype(wide(dtype))
    up = pre["up"].astype(dh.dtype)
    if "gate" not in pre:
        h, slope = activate(activation, up)
        return h.astype(dtype), {"up": (dh * slope).astype(dtype)}
    act, slope = activate(activation, pre["gate"].astype(dh.dtype))
    return (act * up).astype(dtype), {"gate": (dh * up * slope).astype(dtype), "up": (dh * act).astype(dtype)}


def _up_weights(w: Weights) -> dict[str, jax.Array]:
    return {name: w[name] for name in ("w_gate", "w_up", "b_gate", "b_up") if name in w}


def _through_kernel(kernel: Callable[..., Any], formula: Callable[..., Any], kernels: Kernels, **static: Any) -> Any:
    """`kernel` of the same operands as `formula`, whose derivative is the formula's.

    The first derivative is the custom_vjp's own: only a derivative of the backward differentiates this.
    """
    # Loaded here because Mosaic is of no use where no kernel runs.
    from tiled_jax.kernels.common import interpreter

    call = jax.custom_jvp(lambda *operands: kernel(*operands, interpreter() if kernels.interpret else None, **static))
    call.defjvp(lambda primals, tangents: jax.jvp(formula, primals, tangents))
    return call


def _kernel_gate_and_up(x: jax.Array, w: Weights, interpret: Any) -> dict[str, jax.Array]:
    from tiled_jax.kernels import glu_up

    gate, up = glu_up.gate_and_up(
        x, w["w_gate"], w["w_up"], b_gate=w.get("b_gate"), b_up=w.get("b_up"), interpret=interpret
    )
    return {"gate": gate, "up": up}


def _kernel_hidden(
    x: jax.Array, w: Weights, interpret: Any, *, activation: str, keep: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    from tiled_jax.kernels.glu_up import glu_up

    options: dict[str, Any] = {"activation": activation, "keep": keep, "interpret": interpret}
    found = glu_up(x, w["w_gate"], w["w_up"], b_gate=w.get("b_gate"), b_up=w.get("b_up"), **options)
    return (found[0], {"gate": found[1], "up": found[2]}) if keep else (found, {})


def _kernel_dgated(
    dy: jax.Array, pre: Mapping[str, jax.Array], w_down: jax.Array, interpret: Any, *, activation: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    from tiled_jax.kernels.dgated import dgated

    dgate, dup, h = dgated(dy, w_down, pre["gate"], pre["up"], activation=activation, interpret=interpret)
    return h, {"gate": dgate, "up": dup}

"""The formulas of one shard of the MLP, forward and backward, through XLA or through kernels. No loops, no plans.

Letters: t tokens of the shard, H hidden, I intermediate. `w` maps the names w_gate, w_up, w_down [in, out] and b_gate,
b_up, b_down to the operands that exist, all in the dtype of x. Products take that dtype and accumulate in float32;
elementwise work is float32 (float64 for float64). Derived in `shared_specs/README.md`.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.shards import KERNEL_MULTIPLE
from tiled_jax.functional import kernel_steps
from tiled_jax.functional.kernel_steps import Kernels as Kernels
from tiled_jax.functional.kernel_steps import Weights, through_kernel

_SQRT_HALF = math.sqrt(0.5)
_NORMAL_PEAK = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of elementwise work and of sums: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64) if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def activate(activation: str, a: jax.Array, dact: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """(act(a), dact * act'(a)); what the caller does not use is never computed once compiled.

    dact goes into every term, and into none where relu is 0: beside an infinite one inf - inf is then NaN and a negative
    a has no gradient, as in automatic differentiation of the formula.
    """
    match activation:
        case "silu":
            s = jax.nn.sigmoid(a)
            ds = dact * s
            return a * s, ds + a * (ds * (1 - s))
        case "gelu":
            cdf = lax.erfc(-_SQRT_HALF * a) / 2
            return a * cdf, dact * cdf + a * (dact * (jnp.exp(-a * a / 2) * _NORMAL_PEAK))
        case "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2u), whose compiled form is the more accurate one
            s = jax.nn.sigmoid(2 * _TANH_SCALE * (a + _TANH_CUBIC * a * a * a))
            ds = dact * s
            return a * s, ds + a * (ds * (2 * _TANH_SCALE * (1 - s) * (1 + 3 * _TANH_CUBIC * a * a)))
        case "relu":
            return jnp.maximum(a, 0), jnp.where(a > 0, dact, 0)
        case "relu_squared":
            positive = jnp.maximum(a, 0)
            return positive * positive, jnp.where(a > 0, dact * (2 * positive), 0)
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


def _after(first: jax.Array, value: jax.Array) -> jax.Array:
    """value, not known before `first` [rows, columns] is complete. For XLA on CPUs, which orders past its own barriers.

    The condition is always true, which XLA does not see when it orders the program and LLVM does when it compiles it.
    """
    bits = lax.bitcast_convert_type(first[0, 0].astype(jnp.float32), jnp.uint32)
    nothing = lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(31)), jnp.uint32(1))
    return jnp.where(nothing == 0, value, jnp.zeros_like(value))


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, kernels: Kernels | None = None) -> jax.Array:
    """x @ weight + bias, rounded to the dtype of x once."""
    if kernels is not None and kernels.paths.products == "kernel":
        return through_kernel(kernel_steps.linear, linear, kernels)(x, weight, bias)
    if bias is None:
        return product(x, weight, (1, 0), x.dtype)
    total = product(x, weight, (1, 0), wide(x.dtype))
    return (total + bias.astype(total.dtype)).astype(x.dtype)


def gate_and_up(x: jax.Array, w: Weights, kernels: Kernels | None = None) -> dict[str, jax.Array]:
    """The pre-activations [t, I] that backward needs again: gate and up, or up alone in a plain MLP."""
    if kernels is not None and _fused_up(w, kernels):
        return through_kernel(kernel_steps.gate_and_up, gate_and_up, kernels)(x, _up_weights(w))
    names = [name for name in ("gate", "up") if f"w_{name}" in w]
    return {name: linear(x, w[f"w_{name}"], w.get(f"b_{name}"), kernels) for name in names}


def hidden(x: jax.Array, w: Weights, activation: str, kernels: Kernels | None = None) -> jax.Array:
    """h [t, I] of one shard, in the dtype of x."""
    return hidden_and_pre(x, w, activation, kernels, keep=False)[0]


def hidden_and_pre(
    x: jax.Array, w: Weights, activation: str, kernels: Kernels | None = None, *, keep: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h of one shard, and with `keep` the pre-activations it was made from."""

    def formula(x: jax.Array, w: Weights, kernels: Kernels | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        pre = gate_and_up(x, w, kernels)
        return _activated(pre, activation, kernels), pre if keep else {}

    if kernels is not None and _fused_up(w, kernels):
        return through_kernel(kernel_steps.hidden, formula, kernels, activation=activation, keep=keep)(
            x, _up_weights(w)
        )
    if kernels is not None and kernels.paths.up == "auxiliary" and "w_gate" in w and not keep:
        return _hidden_of_gate(x, w, activation, kernels), {}
    return formula(x, w, kernels)


def _hidden_of_gate(x: jax.Array, w: Weights, activation: str, kernels: Kernels) -> jax.Array:
    """h of one shard: gate by XLA's product, then the kernel that makes up and h in one pass."""

    def formula(x: jax.Array, w_up: jax.Array, b_up: jax.Array | None, gate: jax.Array) -> jax.Array:
        return _activated({"gate": gate, "up": linear(x, w_up, b_up)}, activation)

    gate = linear(x, w["w_gate"], w.get("b_gate"), kernels)
    made = through_kernel(kernel_steps.hidden_of_gate, formula, kernels, activation=activation)
    return made(x, w["w_up"], w.get("b_up"), gate)


def down(h: jax.Array, w: Weights, kernels: Kernels | None = None) -> jax.Array:
    """y [t, H_out] of one shard."""
    return linear(h, w["w_down"], w.get("b_down"), kernels)


def _activated(pre: Mapping[str, jax.Array], activation: str, kernels: Kernels | None = None) -> jax.Array:
    if kernels is not None and kernels.paths.products == "kernel":

        def formula(pre: Mapping[str, jax.Array]) -> jax.Array:
            return _activated(pre, activation)

        return through_kernel(kernel_steps.activated, formula, kernels, activation=activation)(pre)
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
    sums: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """The gradients of one shard for the operands named in `wanted`: x in its own dtype, the rest in the wide one.

    Every [t, I] value is rounded to the dtype of x before its products: a float32 operand would make them float32
    products, many times slower on a GPU.

    sums: the sums over the shards before this one (`sum_shape`), to which the gradients of weights and biases are added.
    """
    h, d = pre_activation_gradients(dy, pre, w, activation, wanted, kernels)
    out = {}

    def add(name: str, rows: jax.Array, d: jax.Array) -> None:
        for operand, a in ((f"w_{name}", rows), (f"b_{name}", None)):
            if operand in wanted:
                out[operand] = _summed(a, d, kernels, None if sums is None else sums[operand])

    add("down", h, dy)
    if "w_down" in out and out["w_down"].size and kernels is None and jax.default_backend() == "cpu":
        x = _after(out["w_down"], x)  # transposed for its products, but not while h is still needed
    for name, value in d.items():
        add(name, x, value)
    if "x" in wanted:
        out["x"] = _dx({name: d[name] for name in pre}, {name: w[f"w_{name}"] for name in pre}, kernels)
    return out


def sum_shape(operand: str, shape: tuple[int, ...], kernels: Kernels | None) -> tuple[int, ...]:
    """The shape of the sum over shards of the gradient of a weight or bias of this shape.

    A kernel sums a bias's gradient as the product of the tokens with ones: its rows are all the same (`of_sum`).
    """
    in_rows = operand.startswith("b_") and kernels is not None and kernels.paths.weight_gradient == "kernel"
    return (KERNEL_MULTIPLE, *shape) if in_rows else shape


def of_sum(total: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient [*shape] from its sum over shards."""
    return total if total.shape == shape else total[0]


def _summed(a: jax.Array | None, d: jax.Array, kernels: Kernels | None, total: jax.Array | None) -> jax.Array:
    """total + a^T d, or + the sum of d's rows where a is None, in the wide dtype."""
    if total is not None and kernels is not None and kernels.paths.weight_gradient == "kernel":
        rows = jnp.ones((d.shape[0], KERNEL_MULTIPLE), d.dtype) if a is None else a
        return through_kernel(kernel_steps.weight_gradient, _added, kernels)(total, rows, d)
    acc = wide(d.dtype)
    part = jnp.sum(d, axis=0, dtype=acc) if a is None else product_of_rows(a, d, acc)
    return part if total is None else total + part


def _added(total: jax.Array, a: jax.Array, d: jax.Array) -> jax.Array:
    return total + product_of_rows(a, d, total.dtype)


def _dx(d: Mapping[str, jax.Array], w: Weights, kernels: Kernels | None = None) -> jax.Array:
    """The gradient of x, from those of gate and up and their weights by the same names."""
    if kernels is not None and kernels.paths.products == "kernel":
        return through_kernel(kernel_steps.dx, _dx, kernels)(d, w)
    dtype = d["up"].dtype
    parts = [product(d[name], w[name], (1, 1), wide(dtype)) for name in d]
    return (parts[0] + parts[1] if "gate" in d else parts[0]).astype(dtype)


def pre_activation_gradients(
    dy: jax.Array,
    pre: Mapping[str, jax.Array],
    w: Weights,
    activation: str,
    wanted: Collection[str],
    kernels: Kernels | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate and dup by name where somebody needs them, all [t, I] in the dtype of x."""
    if not {*wanted} - {"w_down", "b_down"}:
        return _activated(pre, activation, kernels), {}
    if kernels is not None and "gate" in pre and kernels.paths.down == "dgated":

        def formula(dy: jax.Array, pre: Mapping[str, jax.Array], w_down: jax.Array) -> Any:
            return pre_activation_gradients(dy, pre, {"w_down": w_down}, activation, wanted)

        return through_kernel(kernel_steps.dgated, formula, kernels, activation=activation)(dy, pre, w["w_down"])
    dh = _dx({"up": dy}, {"up": w["w_down"]}, kernels)
    if kernels is not None and kernels.paths.products == "kernel":

        def of_dh(dh: jax.Array, pre: Mapping[str, jax.Array]) -> Any:
            return _activation_gradients(dh, pre, activation)

        return through_kernel(kernel_steps.activation_gradients, of_dh, kernels, activation=activation)(dh, pre)
    return _activation_gradients(dh, pre, activation)


def _activation_gradients(
    dh: jax.Array, pre: Mapping[str, jax.Array], activation: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate and dup by name, from dh."""
    dtype = dh.dtype
    dh = dh.astype(wide(dtype))
    up = pre["up"].astype(dh.dtype)
    if "gate" not in pre:
        h, dup = activate(activation, up, dh)
        return h.astype(dtype), {"up": dup.astype(dtype)}
    act, dgate = activate(activation, pre["gate"].astype(dh.dtype), dh * up)
    return (act * up).astype(dtype), {"gate": dgate.astype(dtype), "up": (dh * act).astype(dtype)}


def _fused_up(w: Weights, kernels: Kernels) -> bool:
    return "w_gate" in w and kernels.paths.up == "dual"


def _up_weights(w: Weights) -> dict[str, jax.Array]:
    return {name: w[name] for name in ("w_gate", "w_up", "b_gate", "b_up") if name in w}

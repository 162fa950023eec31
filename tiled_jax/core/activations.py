"""The activations of the MLP and their derivatives, elementwise: one copy of the formulas, for XLA and for kernels.

Inside a kernel gelu takes erf where XLA takes erfc: the difference is below the rounding of a 16-bit result. erf is a
rational function here because jax 0.10 cannot lower its own under Warpgroup semantics.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SQRT_HALF = math.sqrt(0.5)
_NORMAL_PEAK = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715

# erf(a) = a P(a^2) / Q(a^2) for |a| <= 4, where it is 1 in float32; the coefficients of Eigen and XLA, highest first.
_ERF_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def activate(
    activation: str,
    a: jax.Array,
    dact: jax.Array | float = 1.0,
    normal_cdf: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (act(a), dact * act'(a)); what the caller does not use is never computed once compiled.

    dact goes into every term, and into none where relu is 0: beside an infinite one inf - inf is then NaN and a negative
    a has no gradient, as in automatic differentiation of the formula.

    normal_cdf: the distribution of the standard normal, for gelu; None is XLA's.
    """
    match activation:
        case "silu":
            s = jax.nn.sigmoid(a)
            ds = dact * s
            return a * s, ds + a * (ds * (1 - s))
        case "gelu":
            cdf = lax.erfc(-_SQRT_HALF * a) / 2 if normal_cdf is None else normal_cdf(a)
            return a * cdf, dact * cdf + a * (dact * (jnp.exp(-0.5 * a * a) * _NORMAL_PEAK))
        case "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2u), whose compiled form is the more accurate one
            s = jax.nn.sigmoid(2 * _TANH_SCALE * (a + _TANH_CUBIC * a * a * a))
            ds = dact * s
            return a * s, ds + a * (ds * (2 * _TANH_SCALE * (1 - s) * (1 + 3 * _TANH_CUBIC * a * a)))
        case "relu":
            return jnp.maximum(a, 0), jnp.where(a > 0, dact, 0.0)
        case "relu_squared":
            positive = jnp.maximum(a, 0)
            return positive * positive, jnp.where(a > 0, dact * (2 * positive), 0.0)
    raise ValueError(f"unknown activation {activation!r}")


def activate_in_kernel(activation: str, a: jax.Array, dact: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """`activate` of float32 values in registers, in operations that Mosaic GPU lowers."""
    return activate(activation, a, dact, lambda a: 0.5 * (1 + erf(_SQRT_HALF * a)))


def erf(a: jax.Array) -> jax.Array:
    """Return the error function of float32 values, absolute error below 2e-7."""
    a = jnp.minimum(jnp.maximum(a, -4.0), 4.0)
    square = a * a
    return a * _polynomial(_ERF_P, square) / _polynomial(_ERF_Q, square)


def _polynomial(coefficients: tuple[float, ...], a: jax.Array) -> jax.Array:
    value = coefficients[0] * a + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * a + coefficient
    return value

"""Forward and backward of the token-wise MLP, gated or plain: y = act(x w_gate) * (x w_up) w_down, with biases.

One function serves twice. As the oracle it runs in float64 with `rounding=None`; as the baseline
(`shared_specs/core/rounding.py`) the same lines run with float32 products and a rounding at every named value. Weights are
[in, out]. Letters: T tokens, H hidden, I intermediate. The formulas are derived in `shared_specs/README.md`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Round = Callable[[Array], Array]

_SQRT_HALF = 0.7071067811865476
_NORMAL_PEAK = 0.3989422804014327  # 1 / sqrt(2 pi)
_TANH_SCALE = 0.7978845608028654  # sqrt(2 / pi)
_TANH_CUBIC = 0.044715


def erf(value: Array) -> Array:
    """Error function to double precision through math.erf: the oracle's arrays are small."""
    return np.vectorize(math.erf, otypes=[np.float64])(value.astype(np.float64)).astype(value.dtype)


def _sigmoid(value: Array) -> Array:
    half = np.asarray(0.5, value.dtype)
    return half * (1 + np.tanh(half * value))


def activate(activation: str, a: Array) -> tuple[Array, Array]:
    """Return (act(a), act'(a)) in the dtype of a."""
    match activation:
        case "silu":
            s = _sigmoid(a)
            return a * s, s * (1 + a * (1 - s))
        case "gelu":
            cdf = (1 + erf(a * np.asarray(_SQRT_HALF, a.dtype))) / 2
            return a * cdf, cdf + a * np.exp(-a * a / 2) * np.asarray(_NORMAL_PEAK, a.dtype)
        case "gelu_tanh":
            scale, cubic = np.asarray(_TANH_SCALE, a.dtype), np.asarray(_TANH_CUBIC, a.dtype)
            t = np.tanh(scale * (a + cubic * a * a * a))
            slope = (1 - t * t) * scale * (1 + 3 * cubic * a * a)
            return a * (1 + t) / 2, (1 + t) / 2 + a * slope / 2
        case "relu":
            return np.maximum(a, 0), (a > 0).astype(a.dtype)
        case "relu_squared":
            positive = np.maximum(a, 0)
            return positive * positive, 2 * positive
        case _:
            raise ValueError(f"unknown activation {activation!r}")


def mlp(
    x: Array,
    w_gate: Array | None,
    w_up: Array,
    w_down: Array,
    dy: Array,
    *,
    biases: dict[str, Array] | None = None,
    activation: str = "silu",
    rounding: Round | None = None,
) -> dict[str, Array]:
    """y and every gradient of sum(y * dy), as a dict: y, dx, dw_gate, dw_up, dw_down and db_* for each bias given.

    Args:
        x, dy: [T, H] and [T, H_out]. w_gate, w_up: [H, I]; w_gate None for a plain MLP. w_down: [I, H_out].
        biases: any of gate [I], up [I], down [H_out].
        rounding: applied to every value a plain implementation would store; None keeps full precision.
    """
    r: Round = rounding or (lambda value: value)
    biases = biases or {}

    def linear(a: Array, w: Array, name: str) -> Array:
        return r(a @ w + biases[name]) if name in biases else r(a @ w)

    up = linear(x, w_up, "up")
    if w_gate is None:
        act, slope = activate(activation, up)
        h = r(act)
    else:
        gate = linear(x, w_gate, "gate")
        act, slope = activate(activation, gate)
        h = r(act * up)
    out = {"y": linear(h, w_down, "down")}
    dh = r(dy @ w_down.T)
    if w_gate is None:
        dup = r(dh * slope)
        out["dx"] = r(dup @ w_up.T)
    else:
        dup, dgate = r(dh * act), r(dh * up * slope)
        out["dx"] = r(dgate @ w_gate.T + dup @ w_up.T)
        out["dw_gate"] = r(x.T @ dgate)
        if "gate" in biases:
            out["db_gate"] = r(dgate.sum(0))
    out["dw_up"], out["dw_down"] = r(x.T @ dup), r(h.T @ dy)
    if "up" in biases:
        out["db_up"] = r(dup.sum(0))
    if "down" in biases:
        out["db_down"] = r(dy.sum(0))
    return out

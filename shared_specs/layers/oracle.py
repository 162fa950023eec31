"""The fused layers of inference in float64, on whole arrays: weights [in, out], all tokens, all features."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def norm_linear(x: Array, norm_weight: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return the results of `norm_column_parallel_linear` of all ranks, side by side."""
    return rms_norm(x, norm_weight, eps) @ weight + bias


def linear_residual_norm(
    x: Array, weight: Array, residual: Array, norm_weight: Array, bias: Array, eps: float
) -> tuple[Array, Array]:
    """Return (normed, h) of `row_parallel_linear_residual_norm` on all ranks: h = residual + x weight + bias."""
    h = residual + x @ weight + bias
    return rms_norm(h, norm_weight, eps), h

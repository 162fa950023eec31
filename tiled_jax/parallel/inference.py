"""Layers of inference inside `jax.shard_map`: a norm with the layer behind it, a row-parallel layer up to the next norm.

Only plain collectives run here: XLA has no symmetric memory that one kernel could reduce, normalise and gather through.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs import collective_checks, inference_checks, layer_checks
from shared_specs.config import ParallelLinearOptions
from tiled_jax.functional.operands import array, operand
from tiled_jax.functional.shard_math import wide
from tiled_jax.parallel import movements
from tiled_jax.parallel.linear import LinearCall

REASONS = {"symmetric_memory": "XLA has no kernel over symmetric memory; it is a path of tiled_torch."}
_OPTIONS = ParallelLinearOptions()  # tokens are dim 0


def norm_column_parallel_linear(
    x: jax.Array,
    norm_weight: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    sequence_parallel: bool = False,
    axis_name: str,
) -> jax.Array:
    """rms_norm(x) @ weight + bias for this device's columns; rms_norm(x) = x / sqrt(mean(x^2) + eps) * norm_weight.

    Args:
        x: [..., H], the same on all devices; with sequence_parallel this device's tokens, dim 0, which are normalised
            before they are gathered.
        norm_weight: [H], the same on all devices. weight: [H, out / R]. bias: [out / R]. All of one floating dtype.
        eps: >= 0. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., out / R], all tokens, in the dtype of x.
    Numerics: the norm is computed in float32 (float64 for float64) and rounded to the dtype of x once.
    Memory: that of its parts; has gradients, as they do.
    Raises:
        As `column_parallel_linear`; SpecError for a norm_weight or eps that does not fit.
    Source: Zhang and Sennrich, arXiv 1910.07467; Megatron-LM, arXiv 1909.08053.
    """
    name = "norm_column_parallel_linear"
    norm_weight = array(name, "norm_weight", norm_weight)
    call = LinearCall.of(name, "column", x, weight, bias, sequence_parallel, _OPTIONS, axis_name)
    inference_checks.check_norm(name, operand(norm_weight), call.x.shape[-1], operand(call.x), eps)
    return call.with_x(_rms_norm(call.x, norm_weight, eps)).column(call.weight)


def row_parallel_linear_residual_norm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    gather: bool = True,
    path: str = "auto",
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    """A row-parallel linear layer, the residual stream it adds to, and the norm of that, in one reduce-scatter and gather.

    h = residual + reduce_scatter(x @ weight) + bias; normed = rms_norm(h). No device normalises another one's tokens.

    Args:
        x: [T, ..., in / R], all tokens, this device's stretch of the features; R divides T.
        weight: [in / R, H]. bias: [H], the same on all devices, added once.
        residual: [T / R, ..., H], this device's tokens. norm_weight: [H], the same on all devices.
        eps: >= 0.
        gather: normed of all tokens, the same on all devices; else this device's.
        path: "auto" or "collectives", which is the same here.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        (normed [T, ..., H] or [T / R, ..., H], h [T / R, ..., H]), in the dtype of x.
    Numerics: parts are rounded to the dtype of x and summed in it; the sums with bias and residual are taken in float32
        (float64 for float64) and rounded once to h, of which the norm is computed in float32.
    Memory: that of its parts; has gradients, as they do.
    Raises:
        As `row_parallel_linear`; SpecError for a residual, norm_weight or eps that does not fit. UnsupportedError:
        path="symmetric_memory".
    Source: sequence parallelism, arXiv 2205.05198; derived from `row_parallel_linear`.
    """
    name = "row_parallel_linear_residual_norm"
    layer_checks.check_flags(name, gather=gather)
    inference_checks.check_path(name, path, REASONS)
    residual, norm_weight = array(name, "residual", residual), array(name, "norm_weight", norm_weight)
    call = LinearCall.of(name, "row", x, weight, bias, True, _OPTIONS, axis_name)
    ranks, features = call.axis.size, call.weight.shape[1]
    collective_checks.check_even(name, call.x.shape, 0, ranks, sizes="")
    shape = (call.x.shape[0] // ranks, *call.x.shape[1:-1], features)
    inference_checks.check_residual(name, operand(residual), shape, operand(call.x))
    inference_checks.check_norm(name, operand(norm_weight), features, operand(call.x), eps)
    total = call.row().astype(wide(call.x.dtype)) + residual.astype(wide(call.x.dtype))
    if call.bias is not None:
        total = total + call.bias.astype(total.dtype)
    h = total.astype(call.x.dtype)
    normed = _rms_norm(h, norm_weight, eps)
    return (movements.gathered(normed, call.axis, 0, same=True) if gather else normed), h


def _rms_norm(x: jax.Array, weight: jax.Array, eps: Any) -> jax.Array:
    a = x.astype(wide(x.dtype))
    scale = lax.rsqrt(jnp.mean(a * a, axis=-1, keepdims=True) + jnp.asarray(eps, a.dtype))
    return (a * scale * weight.astype(a.dtype)).astype(x.dtype)

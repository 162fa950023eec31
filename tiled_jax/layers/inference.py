"""Layers of inference inside `jax.shard_map`: a norm with the layer behind it, a row-parallel layer up to the next norm.

Only plain collectives run here: XLA has no symmetric memory that one kernel could reduce, normalise and gather through.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.config import ParallelLinearOptions
from shared_specs.layers import checks as layer_checks
from shared_specs.layers import inference_checks
from tiled_jax.collectives import conjugates
from tiled_jax.collectives.padding import is_token, without_padding
from tiled_jax.core.arrays import array, operand
from tiled_jax.core.products import product, wide
from tiled_jax.layers.linear import LinearCall

REASONS = {"symmetric_memory": "XLA has no kernel over symmetric memory; it is a path of tiled_torch."}
_OPTIONS = ParallelLinearOptions()  # tokens are dim 0
_HARMLESS = 1  # in rows that are no tokens: their norm has a derivative at any eps, whatever was there


def norm_column_parallel_linear(
    x: jax.Array,
    norm_weight: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    axis_name: str,
) -> jax.Array:
    """rms_norm(x) @ weight + bias for this device's columns; rms_norm(x) = x / sqrt(mean(x^2) + eps) * norm_weight.

    Args:
        x: [..., H], the same on all devices; with sequence_parallel this device's tokens along dim 0, normalised before the
            gather.
        norm_weight: [H], the same on all devices. weight: [H, out / R]. bias: [out / R]. All of one floating dtype.
        eps: >= 0.
        split_sizes: the number of tokens of every device along dim 0, with sequence_parallel; None if all have the same
            number. With split_sizes x has max(split_sizes) rows on every device; rows beyond its own tokens are ignored.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., out / R], all tokens, sum(split_sizes) of them, in the dtype of x.
    Numerics: the norm is computed in float32 (float64 for float64) and rounded to the dtype of x once.
    Memory: that of its parts. Gradients are supported, as for its parts.
    Raises:
        As `column_parallel_linear`; SpecError for a norm_weight or eps that does not fit.
    Source: Zhang and Sennrich, arXiv 1910.07467; Megatron-LM, arXiv 1909.08053.
    """
    name = "norm_column_parallel_linear"
    norm_weight = array(name, "norm_weight", norm_weight)
    call = LinearCall.of(name, "column", x, weight, bias, sequence_parallel, _OPTIONS, axis_name)
    shape, axis = call.x.shape, call.axis
    sizes = inference_checks.check_own_tokens(name, sequence_parallel, split_sizes, shape, axis.size)
    inference_checks.check_norm(name, operand(norm_weight), shape[-1], operand(call.x), eps)
    if sizes is None:
        return call.with_x(_rms_norm(call.x, norm_weight, eps)).column(call.weight)
    own = without_padding(call.x, is_token(sizes, shape[0], axis.name), _HARMLESS)
    gathered = conjugates.all_gather(_rms_norm(own, norm_weight, eps), axis, 0, same=False)
    return replace(call, x=conjugates.unpad_parts(gathered, 0, sizes), tokens=None).column(call.weight)


def row_parallel_linear_residual_norm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    gather: bool = True,
    split_sizes: Sequence[int] | None = None,
    path: str = "auto",
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    """Apply a row-parallel linear layer, add it to the residual stream, and normalise the sum, in one reduce-scatter and
    gather.

    h = residual + reduce_scatter(x @ weight) + bias; normed = rms_norm(h). Each device normalises only its own tokens.

    Args:
        x: [T, ..., in / R], all tokens, this device's slice of the features.
        weight: [in / R, H]. bias: [H], the same on all devices, added once.
        residual: [t, ..., H], this device's tokens: t = T / R, or max(split_sizes) on every device. Rows beyond its own tokens
            are ignored. norm_weight: [H], the same on all devices.
        eps: >= 0.
        gather: return normed of all tokens, the same on all devices; False: of this device's tokens.
        split_sizes: the number of tokens of every device along dim 0, with sum T; None if all have the same number, so that R
            divides T. To decode one token: (1, 0, ...).
        path: "auto" or "collectives"; both are the same here.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        (normed [T, ..., H] or [t, ..., H], h [t, ..., H]), in the dtype of x; zeros beyond this device's own tokens.
    Numerics: parts are rounded to the dtype of x and summed in that dtype. Bias and residual are added in float32 (float64 for
        float64) and rounded once to h. The norm of h is computed in float32.
    Memory: that of its parts. Gradients are supported, as for its parts.
    Raises:
        As `row_parallel_linear`; SpecError for a residual, norm_weight or eps that does not fit. UnsupportedError:
        path="symmetric_memory".
    Source: sequence parallelism, arXiv 2205.05198; derived from `row_parallel_linear`.
    """
    name = "row_parallel_linear_residual_norm"
    layer_checks.check_flags(name, gather=gather)
    inference_checks.check_path(name, path, REASONS)
    residual, norm_weight = array(name, "residual", residual), array(name, "norm_weight", norm_weight)
    x, axis = array(name, "x", x), conjugates.mesh_axis(name, axis_name)
    sizes = inference_checks.check_all_tokens(name, split_sizes, x.shape, axis.size)
    call = LinearCall.of(name, "row", x, weight, bias, False, _OPTIONS, axis_name)  # which knows equal parts only
    features, longest = call.weight.shape[1], max(sizes)
    tokens = is_token(sizes, longest, axis.name)
    shape = (longest, *x.shape[1:-1], features)
    inference_checks.check_residual(name, operand(residual), shape, operand(x), padded=tokens is not None)
    inference_checks.check_norm(name, operand(norm_weight), features, operand(x), eps)
    partial = conjugates.pad_parts(product(x, call.weight, (x.ndim - 1, 0), x.dtype), 0, sizes)
    total = conjugates.reduce_scatter(partial, axis, 0).astype(wide(x.dtype)) + residual.astype(wide(x.dtype))
    if call.bias is not None:
        total = total + call.bias.astype(total.dtype)
    h = without_padding(total.astype(x.dtype), tokens)
    normed = without_padding(_rms_norm(without_padding(h, tokens, _HARMLESS), norm_weight, eps), tokens)
    if gather:
        normed = conjugates.unpad_parts(conjugates.all_gather(normed, axis, 0, same=True), 0, sizes)
    return normed, h


def _rms_norm(x: jax.Array, weight: jax.Array, eps: Any) -> jax.Array:
    a = x.astype(wide(x.dtype))
    scale = lax.rsqrt(jnp.mean(a * a, axis=-1, keepdims=True) + jnp.asarray(eps, a.dtype))
    return (a * scale * weight.astype(a.dtype)).astype(x.dtype)

"""Layers of inference: a norm with the layer behind it, and a row-parallel layer up to the next norm. Under no_grad only."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.errors import UnsupportedError, error_text, fail_type
from shared_specs.layers import checks as layer_checks
from shared_specs.layers import inference_checks
from tiled_torch.collectives import transport
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.autocast import after_autocast, operand, without_autocast
from tiled_torch.core.tensors import refuse_dtensor, wide_dtype
from tiled_torch.layers import inference_symmetric
from tiled_torch.layers.linear import DEFAULTS, LinearArguments

_NORM, _ROW = "norm_column_parallel_linear", "row_parallel_linear_residual_norm"


class InferencePath(NamedTuple):
    """How `row_parallel_linear_residual_norm` exchanges its rows with path="auto".

    path: "collectives" or "symmetric_memory". reason: why the path is not symmetric memory; None if it is.
    """

    path: str
    reason: str | None


def inference_path(device: torch.device | str, dtype: torch.dtype | None = None, *, group: Any = None) -> InferencePath:
    """Return the path that path="auto" selects for tensors of this device and dtype (None: bfloat16) over this group, and why.

    The result depends only on the machine, so it is the same on every rank of equal machines. A call still uses the
    collectives if its rows do not fill whole multicast stores (16 bytes), or if its ranks hold different numbers of tokens
    (split_sizes).

    Raises:
        SpecError, TypeError, UnsupportedError: as `copy_to_tensor_parallel_region` of the group.
    """
    over = rank_group("inference_path", group)
    reason = inference_symmetric.why_not(over, torch.device(device), dtype or torch.bfloat16)
    return InferencePath("collectives" if reason is not None else "symmetric_memory", reason)


@not_compiled
def norm_column_parallel_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """rms_norm(x) weight^T + bias for this rank's outputs; rms_norm(x) = x / sqrt(mean(x^2) + eps) * norm_weight.

    Args:
        x: [..., H], the same on every rank; with sequence_parallel this rank's tokens along dim 0, normalised before the
            gather. norm_weight: [H], the same on every rank.
        weight: [out / R, H]. bias: [out / R] or None. All of one dtype.
        eps: >= 0.
        split_sizes: the number of tokens of every rank along dim 0, with sequence_parallel; None if all have the same number.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [..., out / R] of all tokens, in the dtype of x.
    Numerics: the norm is computed in float32 (float64 for float64) and rounded once.
    Memory: the normalised x in addition to x; with sequence_parallel also its gathered form.
    Raises:
        As `column_parallel_linear`; SpecError for a norm_weight or eps that does not fit; UnsupportedError where a
        gradient would be needed: call it under torch.no_grad().
    Source: Zhang and Sennrich, arXiv 1910.07467; Megatron-LM, arXiv 1909.08053.
    """
    _refuse_gradients(_NORM, x=x, norm_weight=norm_weight, weight=weight, bias=bias)
    call = LinearArguments(_NORM, "column", x, weight, bias, sequence_parallel, split_sizes, DEFAULTS, group)
    call.check_column(gather_output=False)
    like = operand(x, call.cast)
    inference_checks.check_norm(_NORM, operand(norm_weight, call.cast), x.shape[-1], like, eps)
    call.x = _rms_norm(x, norm_weight, eps, x.dtype)
    return call.column(False)


@not_compiled
def row_parallel_linear_residual_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gather: bool = True,
    split_sizes: Sequence[int] | None = None,
    path: str = "auto",
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Apply a row-parallel linear layer, add it to the residual stream, and normalise the sum, in one reduce-scatter and
    gather.

    h = residual + reduce_scatter(x weight^T) + bias; normed = rms_norm(h). Each rank normalises only its own tokens.

    Args:
        x: [T, ..., in / R], all tokens, this rank's slice of the features.
        weight: [H, in / R]. bias: [H], the same on every rank, added once.
        residual: [t, ..., H], this rank's tokens: t = T / R, or split_sizes[rank]. norm_weight: [H], the same on every rank.
        eps: >= 0.
        gather: return normed of all tokens, the same on every rank; False: of this rank's tokens.
        split_sizes: the number of tokens of every rank along dim 0, with sum T; None if all have the same number, so that R
            divides T. To decode one token: (1, 0, ...).
        path: "collectives": the backend's reduce-scatter and all-gather. "symmetric_memory": reads and multicast stores
            between the GPUs (unmeasured), for equal numbers of tokens. "auto": the path that `inference_path` returns.
        group: as in `norm_column_parallel_linear`.
    Returns:
        (normed [T, ..., H] or [t, ..., H], h [t, ..., H]), in the dtype of x.
    Numerics: parts are rounded to the dtype of x and summed over the ranks in float32, on either path; that sum is rounded.
        Bias and residual are added in float32 (float64 for float64) and rounded once to h. The norm of h is computed in
        float32.
    Memory: the partial result [T, ..., H]. Symmetric memory keeps this and the gathered result between calls.
    Raises:
        As `row_parallel_linear`; SpecError for a residual, norm_weight or eps that does not fit; UnsupportedError where
        path="symmetric_memory" cannot run, with the reason, and where a gradient would be needed.
    Source: sequence parallelism, arXiv 2205.05198; derived from `row_parallel_linear`.
    """
    layer_checks.check_flags(_ROW, gather=gather)
    _refuse_gradients(_ROW, x=x, weight=weight, residual=residual, norm_weight=norm_weight, bias=bias)
    call = LinearArguments(_ROW, "row", x, weight, bias, True, split_sizes, DEFAULTS, group)
    like, dtype = operand(x, call.cast), after_autocast(x, call.cast)
    call.check_row(input_is_parallel=True)
    over, sizes, features = call.over, call.sizes, weight.shape[0]
    tokens = x.shape[0] // over.size if sizes is None else sizes[over.rank]
    shape = (tokens, *x.shape[1:-1], features)
    inference_checks.check_residual(_ROW, operand(residual, call.cast), shape, like)
    inference_checks.check_norm(_ROW, operand(norm_weight, call.cast), features, like, eps)
    rows = math.prod(shape[:-1])
    chosen = _path(path, over, x.device, dtype, rows, features, sizes)
    if chosen == "collectives":
        partial = call.row(True)
    else:
        agree(over, x.device, {"path": chosen, "the tokens of x": rows * over.size, "dtype": dtype})
        partial = _partial(over, x.to(dtype), weight.to(dtype), rows * over.size).view(shape)
    wide = wide_dtype(dtype)
    h = partial.to(wide) + residual.to(wide)
    if bias is not None:
        h += bias.to(wide)
    h = h.to(dtype)
    normed = _rms_norm(h, norm_weight, eps, dtype)
    if not gather or not over.several:
        return normed, h
    if chosen == "collectives":
        return transport.all_gather(over, normed, 0, sizes).wait(), h
    return inference_symmetric.all_gather_rows(over, normed.view(rows, features)).view(x.shape[0], *shape[1:]), h


def _partial(over: RankGroup, x: Tensor, weight: Tensor, rows: int) -> Tensor:
    with without_autocast(x):
        partial = inference_symmetric.partial_buffer(over, rows, weight.shape[0], x.dtype, x.device)
        torch.mm(x.reshape(rows, x.shape[-1]), weight.T, out=partial)
        return inference_symmetric.reduce_scatter_rows(over, partial)


def _path(
    path: str,
    over: RankGroup,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    features: int,
    sizes: tuple[int, ...] | None,
) -> str:
    reason = inference_symmetric.why_not(over, device, dtype)
    if reason is None and sizes is not None and len(set(sizes)) > 1:
        reason = f"It exchanges equally many tokens of every rank, and split_sizes is {list(sizes)}."
    if reason is None and not inference_symmetric.fits_multicast(rows, features, dtype):
        reason = f"{rows} rows of {features} features are no whole multicast stores."
    return inference_checks.check_path(_ROW, path, {"symmetric_memory": reason})


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    a = x.to(wide_dtype(x.dtype))
    scale = torch.rsqrt(a.square().mean(-1, keepdim=True) + eps)
    return (a * scale * weight.to(a.dtype)).to(dtype)


def _refuse_gradients(function: str, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            fail_type(function, name, "an array", type(tensor).__name__)
        refuse_dtensor(function, name, tensor, "Pass this rank's part: to_local().")
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            text = error_text(function, name, "without a gradient", "one that requires grad in grad mode")
            raise UnsupportedError(f"{text} Call it under torch.no_grad(); for training compose the layers it fuses.")

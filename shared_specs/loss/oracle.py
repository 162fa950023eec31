"""Forward and backward of the cross entropy of a linear head: logits = x w + b, one target per token.

One function serves twice, as in `oracle/mlp.py`: float64 with `rounding=None` is the oracle; float32 with a rounding at
the logits, their gradient and the results is the baseline. Letters: T tokens, H hidden, V vocabulary. The formulas are
derived in `shared_specs/README.md`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shared_specs.config import LossOptions

Array = np.ndarray[Any, Any]
Round = Callable[[Array], Array]


def log_sum_exp(z: Array) -> Array:
    """log(sum(exp(z))) over the last dim: [T]."""
    top = z.max(-1)
    return top + np.log(np.exp(z - top[:, None]).sum(-1))


def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    upstream: Mapping[str, Array],
    *,
    bias: Array | None = None,
    options: LossOptions,
    rounding: Round | None = None,
) -> dict[str, Array]:
    """Return the loss, the outputs asked for and the gradients of `sum(result * upstream)`: dx, dweight, dbias.

    Of "top_logprobs" the values [T, k], and beside them "top_indices" [T, k].

    Args:
        x: [T, H]. weight: [H, V]. targets: [T] integers. bias: [V].
        upstream: "loss" ([] or, with reduction none, [T]) and any of log_probs, lse, entropy ([T]).
        options: as in `LossOptions`; `class_weight` and `num_valid` are arrays or numbers here.
        rounding: applied to every value a plain implementation would store; None keeps full precision.
    """
    r: Round = rounding or (lambda value: value)
    tokens, vocab = x.shape[0], weight.shape[1]
    one = np.asarray(1.0, x.dtype)
    valid = targets != options.ignore_index
    hit = np.zeros((tokens, vocab), x.dtype)
    hit[np.flatnonzero(valid), targets[valid]] = 1
    class_weight = np.ones(vocab, x.dtype) if options.class_weight is None else options.class_weight.astype(x.dtype)
    counted = valid.astype(x.dtype)

    # Forward.
    stored = r(x @ weight if bias is None else x @ weight + bias)
    z, slope = stored * (one * options.logit_scale), np.full_like(stored, options.logit_scale)
    if options.logit_softcap is not None:
        cap = one * options.logit_softcap
        bent = np.tanh(z / cap)
        z, slope = cap * bent, slope * (1 - bent * bent)
    lse = log_sum_exp(z)
    log_p = z - lse[:, None]
    p = np.exp(log_p)
    smooth = one * options.label_smoothing
    target_weight = (hit * class_weight).sum(-1)
    nll = -(hit * log_p).sum(-1)
    loss = (1 - smooth) * target_weight * nll
    loss += counted * (smooth / vocab * -(class_weight * log_p).sum(-1) + one * options.z_loss * lse * lse)
    out = {"log_probs": -nll, "lse": lse, "entropy": -(p * log_p).sum(-1)}
    right = ((hit * z).sum(-1) == z.max(-1)) & valid
    denominator, count = one, one
    if options.reduction == "mean":
        given = options.num_valid
        denominator = one * given if given is not None else target_weight.sum() if tokens else one * 0
        count = one * given if given is not None else counted.sum()
    out["accuracy"] = _reduce(right.astype(x.dtype), options.reduction, count)
    ranked = np.argsort(-stored if options.logit_scale >= 0 else stored, axis=-1, kind="stable")
    best = ranked[:, : options.top_k or 1]
    out |= {"prediction": best[:, 0], "top_logprobs": np.take_along_axis(log_p, best, axis=-1)}
    out = {"loss": _reduce(loss, options.reduction, denominator)} | {name: out[name] for name in options.outputs}
    out |= {"top_indices": best} if options.top_k else {}

    # Backward: d(sum of upstream * result) / dz, divided by `scale` so that rounding it does not underflow.
    g_loss = np.broadcast_to(np.asarray(upstream["loss"], x.dtype), (tokens,)) * counted
    g_loss = g_loss * (1 / denominator if denominator else 0 * one)
    g = {name: np.asarray(upstream.get(name, np.zeros(tokens)), x.dtype) for name in ("log_probs", "lse", "entropy")}
    g_log_probs = g["log_probs"] * counted
    pull = (1 - smooth) * target_weight + smooth / vocab * class_weight.sum() + 2 * (one * options.z_loss) * lse
    pulled, struck = g_loss * pull - g_log_probs + g["lse"], g_loss * (1 - smooth) * target_weight - g_log_probs
    shared = g_loss[:, None] * (smooth / vocab) * class_weight
    sizes = np.abs(np.stack([pulled, struck, g["entropy"], np.abs(shared).max(-1)])) * abs(one * options.logit_scale)
    scale = sizes.max() if sizes.size and sizes.max() > 0 else one
    dz = p * pulled[:, None]
    dz -= hit * struck[:, None]
    dz -= shared
    dz -= g["entropy"][:, None] * p * (log_p - (p * log_p).sum(-1)[:, None])
    dlogits = r(dz * slope / scale)
    out["dx"] = r(scale * (dlogits @ weight.T))
    out["dweight"] = r(scale * (x.T @ dlogits))
    if bias is not None:
        out["dbias"] = r(scale * dlogits.sum(0))
    return out


def _reduce(values: Array, reduction: str, denominator: Array) -> Array:
    """[T] -> [] (or [T] for none); a mean of nothing is zero."""
    if reduction == "none":
        return values
    total = values.sum(dtype=values.dtype)
    return total if denominator == 1 else total / denominator if denominator else total * 0

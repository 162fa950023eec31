"""Forward and backward of a distillation loss of two linear heads, the teacher's frozen.

One function serves twice, as in `loss/oracle.py`: float64 with `rounding=None` is the oracle; float32 with a rounding at the
logits, their gradient and the results is the baseline. Letters: T tokens, H and G the hidden sizes of student and teacher, V
vocabulary; z, q, p and m as in `objective.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shared_specs.config import LossOptions
from shared_specs.distillation.objective import Objective
from shared_specs.loss.oracle import log_sum_exp

Array = np.ndarray[Any, Any]
Round = Callable[[Array], Array]


def distillation(
    student: Array,
    w_student: Array,
    teacher: Array,
    w_teacher: Array,
    targets: Array | None,
    upstream: Array,
    *,
    objective: Objective,
    bias_student: Array | None = None,
    bias_teacher: Array | None = None,
    token_weight: Array | None = None,
    options: LossOptions = LossOptions(),
    options_teacher: LossOptions | None = None,
    rounding: Round | None = None,
) -> dict[str, Array]:
    """Return the loss and the gradients of `sum(loss * upstream)`: dstudent, dw_student, dbias_student.

    Args:
        student: [T, H]. w_student: [H, V]. teacher: [T, G]. w_teacher: [G, V]. targets, token_weight: [T]. biases: [V].
        upstream: [] or, with reduction none, [T].
        options: the student's logits, ignore_index, reduction and num_valid. options_teacher: the teacher's logits.
        rounding: applied to every value a plain implementation would store; None keeps full precision.
    """
    r: Round = rounding or (lambda value: value)
    tokens, one, o = student.shape[0], np.asarray(1.0, student.dtype), objective
    valid = np.ones(tokens, bool) if targets is None else targets != options.ignore_index
    weight = (
        valid.astype(student.dtype) if token_weight is None else np.where(valid, token_weight, 0).astype(student.dtype)
    )

    z, slope = _logits(r, student, w_student, bias_student, options)
    z_teacher, _ = _logits(r, teacher, w_teacher, bias_teacher, options if options_teacher is None else options_teacher)
    z_soft, z_teacher = z / (one * o.temperature), z_teacher / (one * o.temperature)
    log_q, log_p = z_soft - log_sum_exp(z_soft)[:, None], z_teacher - log_sum_exp(z_teacher)[:, None]
    q, p = np.exp(log_q), np.exp(log_p)
    if o.kind == "forward_kl":
        soft, dsoft = (p * (log_p - log_q)).sum(-1), q - p
    elif o.kind == "reverse_kl":
        soft = (q * (log_q - log_p)).sum(-1)
        dsoft = q * (log_q - log_p - soft[:, None])
    else:
        log_m = np.log(one * o.beta * p + one * (1 - o.beta) * q)
        of_student = (q * (log_q - log_m)).sum(-1)
        soft = o.beta * (p * (log_p - log_m)).sum(-1) + (1 - o.beta) * of_student
        dsoft = (1 - o.beta) * q * (log_q - log_m - of_student[:, None])
    loss, dz = one * o.weight_soft * soft, one * (o.weight_soft / o.temperature) * dsoft
    if o.weight_hard and targets is not None:
        hit = np.zeros_like(z)
        hit[np.flatnonzero(valid), targets[valid]] = 1
        log_hard = z - log_sum_exp(z)[:, None]
        loss = loss + one * o.weight_hard * -(hit * log_hard).sum(-1)
        dz = dz + one * o.weight_hard * (np.exp(log_hard) - hit)
    loss = np.where(valid, weight * loss, 0)

    count = valid.sum() if options.num_valid is None else options.num_valid
    mean = (one / one.dtype.type(count) if count else 0 * one) if options.reduction == "mean" else one
    value = loss if options.reduction == "none" else loss.sum(dtype=loss.dtype) * mean
    g = np.broadcast_to(np.asarray(upstream, student.dtype), (tokens,)) * weight * mean
    scale = np.abs(g).max() if g.size and np.abs(g).max() > 0 else one
    dlogits = r(dz * slope * (g / scale)[:, None])
    out = {"loss": np.asarray(value)}
    out["dstudent"] = r(scale * (dlogits @ w_student.T))
    out["dw_student"] = r(scale * (student.T @ dlogits))
    if bias_student is not None:
        out["dbias_student"] = r(scale * dlogits.sum(0))
    return out


def _logits(r: Round, x: Array, weight: Array, bias: Array | None, options: LossOptions) -> tuple[Array, Array]:
    """Return z [T, V] of a head and its slope in the product."""
    one = np.asarray(1.0, x.dtype)
    stored = r(x @ weight if bias is None else x @ weight + bias)
    z, slope = stored * (one * options.logit_scale), np.full_like(stored, options.logit_scale)
    if options.logit_softcap is None:
        return z, slope
    bent = np.tanh(z / (one * options.logit_softcap))
    return one * options.logit_softcap * bent, slope * (1 - bent * bent)

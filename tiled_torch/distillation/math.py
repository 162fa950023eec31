"""Elementwise work of the distillation loss on a few rows of logits at a time. No loops over shards, no autograd.

Letters: r rows (tokens), V vocabulary; z, q, p, m as in `shared_specs/distillation/objective.py`. Work is float32 (float64 for
float64): in place where logits have that dtype, else on widened copies of these rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from shared_specs.distillation.costs import ROWS_SHARE
from shared_specs.distillation.objective import Objective
from tiled_torch.loss.math import Labels, Rules, row_slices, transform


@dataclass(frozen=True)
class DistillationRules:
    """All that is static about the loss of a token: the objective, the options of both heads' logits, and V."""

    objective: Objective
    options: LossOptions
    options_teacher: LossOptions
    vocab: int

    @property
    def student(self) -> Rules:
        return Rules(self.options, self.vocab)

    @property
    def teacher(self) -> Rules:
        return Rules(self.options_teacher, self.vocab)


class Divergence(NamedTuple):
    """D(p, q) of each row [r], and its gradient in the student's logits over the temperature [r, V], or None."""

    value: Tensor
    gradient: Tensor | None


def losses_(
    rules: DistillationRules, logits: Tensor, logits_teacher: Tensor, labels: Labels, upstream: Tensor | None
) -> Tensor:
    """Return the unweighted loss [t] of each row of logits [t, V], whose room both logits lose.

    upstream: [t] or None; with it `logits` become their gradient, for an upstream gradient of so much on the loss of each row.
    """
    losses = labels.counted.new_empty(logits.shape[0])
    for rows in row_slices(logits, ROWS_SHARE):
        given = logits[rows], logits_teacher[rows], labels[rows], None if upstream is None else upstream[rows]
        losses[rows] = _rows_(rules, *given)
    return losses


def _rows_(
    rules: DistillationRules, logits: Tensor, logits_teacher: Tensor, labels: Labels, upstream: Tensor | None
) -> Tensor:
    o, differentiated = rules.objective, upstream is not None
    z, slope = transform(rules.student, logits, slope=differentiated)
    z_teacher = transform(rules.teacher, logits_teacher, slope=False)[0].to(z.dtype)
    hard = lse = None
    if o.weight_hard:
        lse = z.logsumexp(1)
        hard = lse - z.gather(1, labels.target[:, None])[:, 0]
    z_soft = z.clone() if o.weight_hard and differentiated else z  # z is needed again
    log_q, log_p = (log_softmax_(each, o.temperature) for each in (z_soft, z_teacher))
    found = divergence_(o, log_q, log_p, gradient=differentiated)
    loss = o.weight_soft * found.value
    if hard is not None:
        loss = loss + o.weight_hard * hard
    if upstream is not None:
        assert found.gradient is not None
        dz = found.gradient.mul_(upstream[:, None] * (o.weight_soft / o.temperature))
        if lse is not None:
            of_hard = upstream * o.weight_hard
            p_hard = z.sub_(lse[:, None]).exp_().mul_(of_hard[:, None])
            dz.add_(p_hard.scatter_add_(1, labels.target[:, None], -of_hard[:, None]))
        logits.copy_(dz.mul_(slope if slope is not None else rules.options.logit_scale))
    return torch.where(labels.counted == 0, 0.0, loss * labels.counted)


def log_softmax_(z: Tensor, temperature: float) -> Tensor:
    """z [r, V] becomes log softmax(z / temperature).

    Less the largest first: so what is rounded is at most log V, however large the logits are.
    """
    if temperature != 1.0:
        z.div_(temperature)
    z.sub_(z.amax(1, keepdim=True))
    return z.sub_(z.logsumexp(1, keepdim=True))


def divergence_(o: Objective, log_q: Tensor, log_p: Tensor, *, gradient: bool) -> Divergence:
    """Return D(p, q) of the rows of both [r, V], which lose their values. An entry of probability 0 adds nothing."""
    if o.kind == "forward_kl":
        p, q = log_p.exp(), log_q.exp() if gradient else None
        value = _mean_of(log_p.sub_(log_q), p)
        return Divergence(value, None if q is None else q.sub_(p))
    if o.kind == "reverse_kl":
        q = log_q.exp()
        ratio = log_q.sub_(log_p).masked_fill_(q == 0, 0.0)
        value = (ratio * q).sum(1)
        return Divergence(value, ratio.sub_(value[:, None]).mul_(q) if gradient else None)
    q, p = log_q.exp(), log_p.exp()
    log_m = (q * (1 - o.beta)).add_(p, alpha=o.beta).log_()
    of_teacher = _mean_of(log_p.sub_(log_m), p)
    ratio = log_q.sub_(log_m).masked_fill_(q == 0, 0.0)
    of_student = (ratio * q).sum(1)
    value = o.beta * of_teacher + (1 - o.beta) * of_student
    return Divergence(value, ratio.sub_(of_student[:, None]).mul_(q).mul_(1 - o.beta) if gradient else None)


def _mean_of(ratio_: Tensor, p: Tensor) -> Tensor:
    """Return the sum of p times ratio over each row, 0 where p is; ratio loses its values."""
    return ratio_.masked_fill_(p == 0, 0.0).mul_(p).sum(1)

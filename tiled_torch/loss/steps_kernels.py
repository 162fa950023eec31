"""The steps of one shard of logits by one Triton kernel: a read and a write of device memory for loss and gradient."""

import torch
from torch import Tensor

from tiled_torch.loss.kernels.cross_entropy import cross_entropy
from tiled_torch.loss.math import Coefficients, Labels, Part, Rules, Statistics
from tiled_torch.loss.steps import LossSteps


class KernelLossSteps(LossSteps):
    """float32, bfloat16 and float16 logits; nothing is widened but inside the kernel."""

    def statistics(self, rules: Rules, logits: Tensor, part: Part, labels: Labels, *, keep: bool) -> Statistics:
        return _statistics(rules, logits, part, labels, gradient=False)

    def gradient_(
        self,
        rules: Rules,
        logits: Tensor,
        part: Part,
        labels: Labels,
        lse: Tensor,
        k: Coefficients,
        entropy: Tensor | None,
    ) -> None:
        zero = torch.zeros_like(lse)
        coefficients = torch.stack([zero if of_rows is None else of_rows for of_rows in k])
        d = k.d is not None and entropy is not None
        _launch(rules, logits, part, labels, (lse, entropy, coefficients), None, k.c is not None, d)

    def statistics_and_gradient_(self, rules: Rules, logits: Tensor, part: Part, labels: Labels) -> Statistics:
        return _statistics(rules, logits, part, labels, gradient=True)


def _statistics(rules: Rules, logits: Tensor, part: Part, labels: Labels, *, gradient: bool) -> Statistics:
    t, entries = logits.shape
    found = torch.empty((5, t), dtype=torch.float32, device=logits.device)
    if not entries:  # a rank without entries: what changes no union
        found.zero_()[0] = -torch.inf
    _launch(rules, logits, part, labels, (None, None, None), found, False, False, gradient=gradient)
    top, total, target, weighted, moment = found
    return Statistics(top, total, target, weighted if rules.smooth else None, moment if rules.entropy else None)


def _launch(
    rules: Rules,
    logits: Tensor,
    part: Part,
    labels: Labels,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    found: Tensor | None,
    c: bool,
    d: bool,
    *,
    gradient: bool = True,
) -> None:
    options, total = rules.options, labels.total_weight
    if not isinstance(total, Tensor):
        total = labels.counted.new_full((), total)
    cross_entropy(
        logits, labels.target, labels.counted, labels.weight, labels.class_weight, total, *given, found, rules.vocab,
        part.start, options.logit_scale, options.logit_softcap, options.label_smoothing, options.z_loss, rules.entropy,
        gradient, c, d,
    )  # fmt: skip

"""The steps of one shard of logits by one Triton kernel: a read and a write of device memory for loss and gradient."""

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from tiled_torch.loss.kernels.cross_entropy import cross_entropy
from tiled_torch.loss.math import Coefficients, Columns, Labels, Statistics
from tiled_torch.loss.steps import LossSteps


class KernelLossSteps(LossSteps):
    """float32, bfloat16 and float16 logits; nothing is widened but inside the kernel."""

    def statistics(
        self, logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, *, moment: bool, keep: bool
    ) -> Statistics:
        return _statistics(logits, labels, columns, options, 0, moment=moment, gradient=False)

    def fused_gradient_(
        self, logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, vocab: int
    ) -> Statistics:
        return _statistics(logits, labels, columns, options, vocab, moment=False, gradient=True)

    def gradient_(
        self,
        logits: Tensor,
        of_rows: tuple[Tensor, Tensor | None, Coefficients],
        labels: Labels,
        columns: Columns,
        options: LossOptions,
    ) -> None:
        lse, entropy, k = of_rows
        zero = torch.zeros_like(lse)
        coefficients = torch.stack([zero if part is None else part for part in k])
        d = k.d is not None and entropy is not None
        _launch(logits, labels, columns, options, 0, (lse, entropy, coefficients), None, k.c is not None, d)


def _statistics(
    logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, vocab: int, *, moment: bool, gradient: bool
) -> Statistics:
    t, width = logits.shape
    found = torch.empty((5, t), dtype=torch.float32, device=logits.device)
    if not width:  # a rank without entries: what changes no union
        found.zero_()[0] = -torch.inf
    given = (None, None, None)
    _launch(logits, labels, columns, options, vocab, given, found, False, False, moment=moment, gradient=gradient)
    top, total, target, weighted, moments = found
    return Statistics(top, total, target, weighted if options.label_smoothing else None, moments if moment else None)


def _launch(
    logits: Tensor,
    labels: Labels,
    columns: Columns,
    options: LossOptions,
    vocab: int,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    found: Tensor | None,
    c: bool,
    d: bool,
    *,
    moment: bool = False,
    gradient: bool = True,
) -> None:
    total = labels.total_weight
    if not isinstance(total, Tensor):
        total = labels.counted.new_full((), total)
    cross_entropy(
        logits, labels.index, labels.counted, labels.weight, labels.class_weight, total, *given, found, vocab,
        columns.start, options.logit_scale, options.logit_softcap, options.label_smoothing, options.z_loss, moment,
        gradient, c, d,
    )  # fmt: skip

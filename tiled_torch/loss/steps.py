"""What one shard of logits goes through, step by step: by PyTorch operations, which run on every device.

`loss/steps_kernels.py` has the same steps by a Triton kernel; the loops of `loss/loops.py` take
either. Letters: t tokens of the shard, v entries of the vocabulary shard. Logits are [t, v] in the compute dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.math import Coefficients, Columns, Labels, Statistics


class LossSteps:
    """The steps by PyTorch operations, a few rows at a time."""

    def statistics(
        self, logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, *, moment: bool, keep: bool
    ) -> Statistics:
        """Return statistics of every row; the logits are spent afterwards unless `keep`. moment: what an entropy needs."""
        parts = []
        for block in loss_math.blocks(logits):
            z = loss_math.transformed(logits[block], options, slope=False, copy=keep)[0]
            smooth = bool(options.label_smoothing)
            parts.append(loss_math.exponentials_(z, labels[block], columns, weighted=smooth, moment=moment))
            del z  # may be a copy: before the next one is made
        return joined(parts)

    def fused_gradient_(
        self, logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, vocab: int
    ) -> Statistics:
        """Return statistics of rows over the whole vocabulary, which become dlogits of the sum of the losses."""
        return joined(
            [
                loss_math.fused_gradient_(logits[block], labels[block], columns, options, vocab)
                for block in loss_math.blocks(logits)
            ]
        )

    def gradient_(
        self,
        logits: Tensor,
        of_rows: tuple[Tensor, Tensor | None, Coefficients],
        labels: Labels,
        columns: Columns,
        options: LossOptions,
    ) -> None:
        """Logits become dlogits. of_rows: lse and entropy over the whole vocabulary, and the coefficients; [t] each."""
        lse, entropy, k = of_rows
        for block in loss_math.blocks(logits):
            of_block = (lse[block], None if entropy is None else entropy[block], k[block])
            loss_math.gradient_(logits[block], *of_block, labels[block], columns, options)


def joined(parts: Sequence[Statistics]) -> Statistics:
    """Return statistics of the rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return Statistics(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


EAGER = LossSteps()

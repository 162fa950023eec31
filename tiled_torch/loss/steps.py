"""What one shard of logits goes through, step by step: by PyTorch operations, which run on every device.

`loss/steps_kernels.py` has the same steps by a Triton kernel; the loops of `loss/loops.py` take
either. Letters: t tokens of the shard, v entries of one part of the vocabulary. Logits are [t, v] in the compute dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiled_torch.loss import math as loss_math
from tiled_torch.loss.math import Coefficients, Labels, Part, Rules, Statistics


class LossSteps:
    """The steps by PyTorch operations, a few rows at a time."""

    def statistics(self, rules: Rules, logits: Tensor, part: Part, labels: Labels, *, keep: bool) -> Statistics:
        """Return statistics of the part, of every row; the logits are spent afterwards unless `keep`."""
        found = []
        for rows in loss_math.row_slices(logits):
            z = loss_math.transform(rules, logits[rows], slope=False, copy=keep)[0]
            found.append(loss_math.statistics_(rules, z, part, labels[rows]))
            del z  # may be a copy: before the next one is made
        return join_rows(found)

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
        """Logits become dlogits. lse, entropy: over the whole vocabulary, [t]."""
        for rows in loss_math.row_slices(logits):
            of_rows = labels[rows], lse[rows], k[rows], None if entropy is None else entropy[rows]
            loss_math.gradient_(rules, logits[rows], part, *of_rows)

    def statistics_and_gradient_(self, rules: Rules, logits: Tensor, part: Part, labels: Labels) -> Statistics:
        """Return statistics of a part that is the whole vocabulary; logits become dlogits of the sum of the losses."""
        slices = loss_math.row_slices(logits)
        return join_rows(
            [loss_math.statistics_and_gradient_(rules, logits[rows], part, labels[rows]) for rows in slices]
        )


def join_rows(found: Sequence[Statistics]) -> Statistics:
    """Return the statistics of the rows of all of these, in order."""
    if len(found) == 1:
        return found[0]
    columns = zip(*found, strict=True)
    return Statistics(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


EAGER = LossSteps()

"""What one shard of logits goes through, step by step: by XLA, which runs on every device.

`loss/steps_kernels.py` has the same steps by a Pallas kernel; the loops of `loss/autodiff.py` take either.
Letters: t tokens of the shard, v entries of one part of the vocabulary. Logits are [t, v] in the dtype of x.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from tiled_jax.core.linear_call import barrier
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.math import Coefficients, Labels, Part, Rules, Statistics


@dataclass(frozen=True)
class LossSteps:
    """The steps by XLA. Static: a part of what a compiled program is found by."""

    backend: ClassVar[str] = "xla"

    def columns(self, entries: int) -> int:
        """Return how many columns the logits of a part of the vocabulary have, padding among them."""
        return entries

    def in_place(self, *operands: jax.Array) -> bool:
        """Return whether dlogits are written over the logits of a loss of these operands."""
        return True

    def statistics(self, rules: Rules, logits: jax.Array, part: Part, labels: Labels) -> Statistics:
        """Return statistics of the part, of every row."""
        return loss_math.statistics(rules, logits, part, labels)

    def gradient(
        self,
        rules: Rules,
        logits: jax.Array,
        part: Part,
        labels: Labels,
        found: Statistics,
        k: Coefficients,
        entropy: jax.Array | None,
    ) -> jax.Array:
        """dlogits. found: top and total over the whole vocabulary."""
        return loss_math.gradient(rules, logits, part, labels, found, k, entropy)

    def statistics_and_gradient(
        self,
        rules: Rules,
        logits: jax.Array,
        part: Part,
        labels: Labels,
        class_total: jax.Array | int,
        size: jax.Array | float = 1,
    ) -> tuple[Statistics, jax.Array]:
        """Return statistics of a part that is the whole vocabulary, and dlogits of the sum of the losses divided by `size`."""
        found = self.statistics(rules, logits, part, labels)
        # Every reader of the logits but one done, their gradient is written over them.
        logits, after = barrier((logits, found))
        k = loss_math.loss_coefficients(rules, labels, loss_math.log_sum_exp(rules, after), class_total, size)
        return found, self.gradient(rules, logits, part, labels, after, k, None)


XLA = LossSteps()

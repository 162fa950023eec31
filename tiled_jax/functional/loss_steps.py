"""What one shard of logits goes through, step by step: by XLA, which runs on every device.

`functional/kernel_loss_steps.py` has the same steps by a Pallas kernel; the loops of `functional/loss_vjp.py` take either.
Letters: t tokens of the shard, v entries of one part of the vocabulary. Logits are [t, v] in the dtype of x.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax import backends
from tiled_jax.functional import loss_math
from tiled_jax.functional.loss_math import Labels, Part, Rules, Slopes, Statistics


@dataclass(frozen=True)
class LossSteps:
    """The steps by XLA. Static: a part of what a compiled program is found by."""

    backend: ClassVar[str] = "xla"

    def columns(self, entries: int) -> int:
        """How many columns the logits of a part of the vocabulary have, padding among them."""
        return entries

    def in_place(self, *operands: jax.Array) -> bool:
        """Whether dlogits are written over the logits of a loss of these operands."""
        return True

    def statistics(self, rules: Rules, logits: jax.Array, part: Part, labels: Labels) -> Statistics:
        """Statistics of the part, of every row."""
        return loss_math.statistics(rules, logits, part, labels.target)

    def gradient(
        self,
        rules: Rules,
        logits: jax.Array,
        part: Part,
        labels: Labels,
        found: Statistics,
        slope: Slopes,
        entropy: jax.Array | None,
    ) -> jax.Array:
        """dlogits. found: best and total over the whole vocabulary."""
        return loss_math.logit_gradients(rules, logits, part, labels, found, slope, entropy)

    def statistics_and_gradient(
        self, rules: Rules, logits: jax.Array, part: Part, labels: Labels, class_total: jax.Array | int
    ) -> tuple[Statistics, jax.Array]:
        """Statistics of a part that is the whole vocabulary, and dlogits of the sum of the losses."""
        found = self.statistics(rules, logits, part, labels)
        # Every reader of the logits but one done, their gradient is written over them.
        logits, after = lax.optimization_barrier((logits, found))
        slope = loss_math.slopes_of_losses(rules, labels, loss_math.log_sum_exp(rules, after), class_total)
        return found, self.gradient(rules, logits, part, labels, after, slope, None)


XLA = LossSteps()


def choose_steps(function: str, backend: str, dtype: Any) -> LossSteps:
    """The steps for this argument and logits of this dtype; UnsupportedError for a backend named that cannot run them."""

    def no_kernel() -> str | None:
        from tiled_jax.kernels.cross_entropy import logits_reason

        return logits_reason(jnp.dtype(dtype))

    if backends.choose(function, backend, no_kernel=no_kernel) == "xla":
        return XLA
    from tiled_jax.functional.kernel_loss_steps import KernelLossSteps  # where no kernel runs, Mosaic is not loaded

    return KernelLossSteps(interpret=backends.interpreting())

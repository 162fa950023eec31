"""The steps of one shard of logits by one Pallas kernel: a read and a write of device memory for loss and gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tiled_jax.core.loops import vary_over, varying_of
from tiled_jax.core.mosaic import differentiated_as, interpreter, takes_ref
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.kernels import cross_entropy
from tiled_jax.loss.math import Coefficients, Labels, Part, Rules, Statistics
from tiled_jax.loss.steps import XLA, LossSteps


@dataclass(frozen=True)
class KernelLossSteps(LossSteps):
    """float32, bfloat16 and float16 logits; nothing is widened but inside the kernel. Columns are padded to a multiple of 128.

    A derivative of a step, which only a second derivative of the loss needs, is that of the formulas.
    """

    interpret: bool
    backend: ClassVar[str] = "pallas"

    def columns(self, entries: int) -> int:
        multiple = cross_entropy.COLUMN_MULTIPLE
        return -(-entries // multiple) * multiple

    def in_place(self, *operands: jax.Array) -> bool:
        return takes_ref(self._interpreter(), *operands)

    def statistics(self, rules: Rules, logits: jax.Array, part: Part, labels: Labels) -> Statistics:
        part, entries = _without_weight(part), _entries(part, logits)

        def kernel(logits: jax.Array, part: Part, labels: Labels) -> Statistics:
            columns = _columns(rules, logits, part, labels, entries)
            return Statistics(*self._run(cross_entropy.statistics, rules, logits, columns))

        def formula(logits: jax.Array, part: Part, labels: Labels) -> Statistics:
            return XLA.statistics(rules, logits[:, :entries], part, labels)

        return differentiated_as(formula, kernel)(logits, part, labels)

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
        part, entries, width = _without_weight(part), _entries(part, logits), logits.shape[1]

        def kernel(logits: jax.Array, *of_rows: Any) -> jax.Array:
            part, labels, found, k, entropy = of_rows
            columns, of_rows = _columns(rules, logits, part, labels, entries), _coefficients(k, entropy)
            return self._run(cross_entropy.gradient, rules, logits, columns, of_rows, found.top, found.total)

        def formula(logits: jax.Array, *of_rows: Any) -> jax.Array:
            return loss_math.with_columns(XLA.gradient(rules, logits[:, :entries], *of_rows), width)

        return differentiated_as(formula, kernel)(logits, part, labels, found, k, entropy)

    def statistics_and_gradient(
        self,
        rules: Rules,
        logits: jax.Array,
        part: Part,
        labels: Labels,
        class_total: jax.Array | int,
        size: jax.Array | float = 1,
    ) -> tuple[Statistics, jax.Array]:
        part, entries, width = _without_weight(part), _entries(part, logits), logits.shape[1]

        def kernel(
            logits: jax.Array, part: Part, labels: Labels, total: jax.Array, size: jax.Array
        ) -> tuple[Statistics, jax.Array]:
            zeros = jnp.zeros_like(labels.weight)
            k = _coefficients(loss_math.loss_coefficients(rules, labels, zeros, total, size), None)
            if rules.options.z_loss:
                k = k._replace(of_lse=loss_math.weighted(labels, labels.counted * (2 * rules.options.z_loss / size)))
            columns = _columns(rules, logits, part, labels, entries)
            found, dlogits = self._run(cross_entropy.statistics_and_gradient, rules, logits, columns, k)
            return Statistics(*found), dlogits

        def formula(
            logits: jax.Array, part: Part, labels: Labels, total: jax.Array, size: jax.Array
        ) -> tuple[Statistics, jax.Array]:
            found, dlogits = XLA.statistics_and_gradient(rules, logits[:, :entries], part, labels, total, size)
            return found, loss_math.with_columns(dlogits, width)

        total, size = (jnp.asarray(a, labels.weight.dtype) for a in (class_total, size))
        return differentiated_as(formula, kernel)(logits, part, labels, total, size)

    def _run(self, launch: Callable[..., Any], rules: Rules, logits: jax.Array, *operands: Any) -> Any:
        """Return one launch; under `shard_map` the logits, which become a result, vary wherever a result does."""
        logits = vary_over(logits, varying_of(jax.tree.leaves(operands)))
        return launch(logits, *operands, options=rules.options, interpret=self._interpreter())

    def _interpreter(self) -> Any:
        return interpreter() if self.interpret else None


def _without_weight(part: Part) -> Part:
    """As arrays alone; the logits are there already."""
    return part._replace(start=jnp.asarray(part.start, jnp.int32), weight=None, bias=None, entries=None)


def _entries(part: Part, logits: jax.Array) -> int:
    return logits.shape[1] if part.entries is None else part.entries


def _columns(rules: Rules, logits: jax.Array, part: Part, labels: Labels, entries: int) -> cross_entropy.Columns:
    """Return the columns of logits [t, width], of which the part has the first `entries`."""
    (rows, width), weight = logits.shape, part.class_weight
    column = labels.target - part.start.astype(labels.target.dtype)
    here = (column >= 0) & (column < entries)
    real = None
    if rules.padded or entries < width:
        real = jnp.broadcast_to(jnp.clip(rules.vocab - part.start, 0, entries), (rows,))
    return cross_entropy.Columns(
        target=jnp.where(here, column, -1).astype(jnp.int32),
        real=real,
        weight=None if weight is None else loss_math.with_columns(weight, width),
    )


def _coefficients(k: Coefficients, entropy: jax.Array | None) -> cross_entropy.RowCoefficients:
    with_entropy = k.d is not None and entropy is not None
    d, entropy = (k.d, entropy) if with_entropy else (None, None)
    return cross_entropy.RowCoefficients(k.a, k.b, k.c, d, entropy)

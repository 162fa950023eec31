"""Elementwise work of the distillation loss on the logits of a shard. No loops, no rules of differentiation.

Letters: t tokens, V vocabulary; z, q, p, m as in `shared_specs/distillation/objective.py`. Work is float32 (float64 for
float64).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shared_specs.config import LossOptions
from shared_specs.distillation.objective import Objective
from tiled_jax.core.products import wide
from tiled_jax.loss.math import Labels, Rules, transform


@dataclass(frozen=True)
class DistillationRules:
    """All that is static about the loss of a token: the objective, the options of both heads' logits, and V."""

    objective: Objective
    options: LossOptions
    options_teacher: LossOptions
    vocab: int

    @property
    def student(self) -> Rules:
        return Rules(options=self.options, vocab=self.vocab)

    @property
    def teacher(self) -> Rules:
        return Rules(options=self.options_teacher, vocab=self.vocab)


class Divergence(NamedTuple):
    """D(p, q) of each row [t], and its gradient in the student's logits over the temperature [t, V]."""

    value: jax.Array
    gradient: jax.Array


def losses_and_gradient(
    rules: DistillationRules, logits: jax.Array, logits_teacher: jax.Array, labels: Labels, upstream: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the unweighted loss [t] of rows of logits [t, V] and, for upstream gradients [t] of it, that of the logits."""
    o, dtype = rules.objective, wide(logits.dtype)
    z, slope = transform(rules.student, logits.astype(dtype))
    z_teacher, _ = transform(rules.teacher, logits_teacher.astype(dtype))
    found = divergence(o, _log_softmax(z, o.temperature), _log_softmax(z_teacher, o.temperature))
    loss, dz = o.weight_soft * found.value, (o.weight_soft / o.temperature) * found.gradient
    if o.weight_hard:
        target = labels.target[:, None]
        log_hard = _log_softmax(z, 1.0)
        loss -= o.weight_hard * jnp.take_along_axis(log_hard, target, axis=1)[:, 0]
        hit = jnp.arange(z.shape[1], dtype=target.dtype)[None, :] == target
        dz += o.weight_hard * (jnp.exp(log_hard) - hit.astype(z.dtype))
    loss = jnp.where(labels.counted == 0, 0, loss * labels.counted)
    return loss, None if upstream is None else (dz * slope * upstream[:, None]).astype(logits.dtype)


def _log_softmax(z: jax.Array, temperature: float) -> jax.Array:
    z = z if temperature == 1 else z / temperature
    below = z - jax.lax.stop_gradient(jnp.max(z, axis=1, keepdims=True))
    return below - jnp.log(jnp.sum(jnp.exp(below), axis=1, keepdims=True))


def divergence(o: Objective, log_q: jax.Array, log_p: jax.Array) -> Divergence:
    """Return D(p, q) of the rows of both [t, V]. An entry of probability 0 adds nothing."""
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if o.kind == "forward_kl":
        return Divergence(_mean_of(log_p - log_q, p), q - p)
    if o.kind == "reverse_kl":
        value = _mean_of(log_q - log_p, q)
        return Divergence(value, q * (jnp.where(q == 0, 0, log_q - log_p) - value[:, None]))
    log_m = jnp.log(o.beta * p + (1 - o.beta) * q)
    of_student = _mean_of(log_q - log_m, q)
    value = o.beta * _mean_of(log_p - log_m, p) + (1 - o.beta) * of_student
    return Divergence(value, (1 - o.beta) * q * (jnp.where(q == 0, 0, log_q - log_m) - of_student[:, None]))


def _mean_of(ratio: jax.Array, p: jax.Array) -> jax.Array:
    """Return the sum of p times ratio over each row, 0 where p is."""
    return jnp.sum(jnp.where(p == 0, 0, ratio * p), axis=1)

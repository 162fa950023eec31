"""`bench --op loss` in JAX: forward and backward of one linear cross entropy, every variant compiled once and interleaved."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs.app.bench.bench import Rows
from shared_specs.app.bench.workloads import LossWorkload
from shared_specs.loss.costs import plan_loss
from tiled_jax import tiled_linear_cross_entropy
from tiled_jax.commands.bench.peers import PACKAGES, facts, measure_programs, temp_bytes

__all__ = ["PACKAGES", "facts", "measure", "variants"]
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def measure(workload: LossWorkload, repeats: int) -> Rows:
    """Return one result a variant, after checking that every variant computes the same loss and gradients."""
    plan = plan_loss("bench", workload.shape)
    fns = {name: jax.value_and_grad(loss, argnums=(0, 1)) for name, loss in variants(plan.shard_tokens).items()}
    quantities = ("loss", "dx", "dweight")
    return measure_programs(workload, len(plan), fns, _arguments(workload), quantities, repeats, temp_bytes)


def variants(shard_tokens: int) -> dict[str, Loss]:
    """Name -> mean loss of hidden states, weight and targets."""
    return {
        "plain": lambda x, weight, targets: jnp.sum(losses(x, weight, targets)) / counted(targets, x.dtype),
        "scan-checkpoint": partial(scan_checkpoint, shard_tokens),
        "tiled": tiled_linear_cross_entropy,
    }


def losses(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of every token, [T]; 0 where it has no label."""
    logits = jnp.dot(x, weight, precision="highest")
    of_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - of_target, 0)


def counted(targets: jax.Array, dtype: Any) -> jax.Array:
    """Return how many tokens have a label."""
    return jnp.sum((targets >= 0).astype(dtype))


def scan_checkpoint(shard_tokens: int, x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the result of the loop that JAX users write today; the tokens have to be a multiple of the shard."""

    @partial(jax.checkpoint, prevent_cse=False)
    def body(x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.sum(losses(x, weight, targets))

    shards = x.reshape(-1, shard_tokens, x.shape[-1]), targets.reshape(-1, shard_tokens)
    total, _ = lax.scan(lambda total, shard: (total + body(*shard), None), jnp.zeros((), x.dtype), shards)
    return total / counted(targets, x.dtype)


def _arguments(workload: LossWorkload) -> tuple[jax.Array, ...]:
    """x, the weight and targets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((workload.tokens, workload.hidden), np.float32)
    weight = rng.standard_normal((workload.hidden, workload.vocab), np.float32) * workload.hidden**-0.5
    operands = (jnp.asarray(a, workload.dtype) for a in (x, weight))
    return *operands, jnp.asarray(workload.targets(), jnp.int32)

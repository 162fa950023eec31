"""The loss of a causal language model."""

import jax
import jax.numpy as jnp

from shared_specs.config import LossOptions
from tiled_jax.loss.api import tiled_linear_cross_entropy
from tiled_jax.models.llama import Llama

Saved = tuple[jax.Array, jax.Array, jax.Array]
IGNORED = LossOptions().ignore_index


def next_token_loss(model: Llama, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats, float32.

    Args:
        model: its `loss_tiling` says how the tokens of the loss are cut; with plain=True they are not.
        tokens: [batch, tokens + 1] int32; the first `tokens` of a row go in, the last `tokens` are to be predicted. Rows
            that are shorter end in -100, which nothing predicts and the mean does not count.
    Returns:
        A float32 scalar; NaN where there is nothing to predict.
    Numerics: logits and their gradient have the compute dtype; everything between is float32.
    Memory: the logits of one shard of tokens; plain: one array [batch * tokens, vocab_size], which in backward becomes
        its own gradient.
    """
    inputs, targets = inputs_and_targets(tokens)
    hidden, targets = model.hidden(inputs), targets.reshape(-1)
    if model.plain:
        return _mean_cross_entropy(model.logits(hidden), targets)
    return tiled_linear_cross_entropy(hidden, model.head_weight(), targets, tiling=model.loss_tiling)


def inputs_and_targets(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[batch, tokens + 1] -> what goes in and what is to be predicted, [batch, tokens] each; padding goes in as entry 0.

    No other position of a causal model sees what stands behind its own.
    """
    inputs = tokens[:, :-1]
    return jnp.where(inputs == IGNORED, jnp.zeros_like(inputs), inputs), tokens[:, 1:]


@jax.custom_vjp
def _mean_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits: [rows, vocab_size]; targets: [rows]."""
    return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Saved]:
    valid = targets != IGNORED
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    of_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[:, None], axis=-1)[:, 0].astype(jnp.float32)
    return jnp.sum(jnp.where(valid, lse - of_target, 0.0)) / valid.sum().astype(jnp.float32), (logits, lse, targets)


def _backward(saved: Saved, d_loss: jax.Array) -> tuple[jax.Array, None]:
    # Written out so that XLA makes it one pass over the logits, in place; of the derivative it makes two arrays.
    logits, lse, targets = saved
    probability = jnp.exp(logits.astype(jnp.float32) - lse[:, None])
    is_target = targets[:, None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, :]
    valid = (targets != IGNORED).astype(jnp.float32)
    each = valid * (d_loss / valid.sum())
    return ((probability - is_target.astype(jnp.float32)) * each[:, None]).astype(logits.dtype), None


_mean_cross_entropy.defvjp(_forward, _backward)

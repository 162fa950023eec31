"""The loss of a causal language model."""

import jax
import jax.numpy as jnp

from tiled_jax.functional import tiled_linear_cross_entropy
from tiled_jax.models.llama import Llama

Saved = tuple[jax.Array, jax.Array, jax.Array]


def next_token_loss(model: Llama, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats, float32.

    Args:
        model: its `loss_tiling` says how the tokens of the loss are cut; with plain=True they are not.
        tokens: [batch, tokens + 1] int32; the first `tokens` of a row go in, the last `tokens` are to be predicted.
    Returns:
        A float32 scalar.
    Numerics: logits and their gradient have the compute dtype; everything between is float32.
    Memory: the logits of one shard of tokens; plain: one array [batch * tokens, vocab_size], which in backward becomes
        its own gradient.
    """
    hidden, targets = model.hidden(tokens[:, :-1]), tokens[:, 1:].reshape(-1)
    if model.plain:
        return _mean_cross_entropy(model.logits(hidden), targets)
    return tiled_linear_cross_entropy(hidden, model.head_weight(), targets, tiling=model.loss_tiling)


@jax.custom_vjp
def _mean_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits: [rows, vocab_size]; targets: [rows]."""
    return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Saved]:
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    of_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0].astype(jnp.float32)
    return jnp.mean(lse - of_target), (logits, lse, targets)


def _backward(saved: Saved, d_loss: jax.Array) -> tuple[jax.Array, None]:
    # Written out so that XLA makes it one pass over the logits, in place; of the derivative it makes two arrays.
    logits, lse, targets = saved
    probability = jnp.exp(logits.astype(jnp.float32) - lse[:, None])
    is_target = targets[:, None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, :]
    return ((probability - is_target.astype(jnp.float32)) * (d_loss / lse.size)).astype(logits.dtype), None


_mean_cross_entropy.defvjp(_forward, _backward)

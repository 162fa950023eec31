"""The loss of a causal language model."""

import jax
import jax.numpy as jnp

from tiled_jax.models.llama import Llama


def next_token_loss(model: Llama, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats, float32.

    Args:
        tokens: [batch, tokens + 1] int32; the first `tokens` of a row go in, the last `tokens` are to be predicted.
    Returns:
        A float32 scalar.
    Numerics: the logits have the compute dtype; everything after them is float32.
    Memory: one array [batch * tokens, vocab_size], which in backward becomes its own gradient.
    """
    logits = model.logits(model.hidden(tokens[:, :-1])).astype(jnp.float32)
    targets = tokens[:, 1:].reshape(-1, 1)
    # A comparison instead of a gather, whose gradient would be scattered into a second array of the logits' size.
    is_target = targets == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, :]
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_target)

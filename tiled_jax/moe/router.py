"""The router of one shard of tokens: which experts a token has, what each of them counts, and the derivative of that.

Letters: t tokens of the shard, E experts, k of them for each token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Choice(NamedTuple):
    """Of every token: the numbers of its experts, the likeliest first, and what each of them counts; both [t, k]."""

    index: jax.Array
    share: jax.Array


def choice_of(logits: jax.Array, top_k: int, scoring: str, normalize: bool) -> Choice:
    """Return the choice from logits [t, E] in the wide dtype."""
    _, index = lax.top_k(logits, top_k)
    share = _chosen(scores(logits, scoring), index)
    return Choice(index, share / _total(share) if normalize else share)


def logit_gradients(
    logits: jax.Array, index: jax.Array, of_share: jax.Array, scoring: str, normalize: bool
) -> jax.Array:
    """Return the gradient of the logits [t, E] from that of what the experts count [t, k]."""
    p = scores(logits, scoring)
    if normalize:
        total = _total(_chosen(p, index))
        share = _chosen(p, index) / total
        of_share = (of_share - jnp.sum(of_share * share, axis=-1, keepdims=True)) / total
    tokens = jnp.arange(index.shape[0], dtype=index.dtype)[:, None]
    of_p = jnp.zeros_like(p).at[tokens, index].set(of_share)
    if scoring == "sigmoid":
        return of_p * p * (1 - p)
    return p * (of_p - jnp.sum(of_p * p, axis=-1, keepdims=True))


def scores(logits: jax.Array, scoring: str) -> jax.Array:
    """Return the softmax of the logits over all experts, or the sigmoid of each."""
    return jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _chosen(p: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(p, index, axis=-1)


def _total(share: jax.Array) -> jax.Array:
    return jnp.sum(share, axis=-1, keepdims=True)

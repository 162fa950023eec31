"""What the numbers of every token of the loss are where its loop has not been: rows without a label."""

from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.config import LossOptions

# Of a row that was not reached: above every logit, so that its probabilities are zero and everything made of them finite.
_UNREACHED = {"top": 1e18, "total": 1.0}
# What there are top_k of for every token; entries of the vocabulary.
OF_ENTRIES, _INTEGERS = ("top_logprobs", "top_indices"), ("prediction", "top_indices")


def before_first(name: str, tokens: int, dtype: Any, options: LossOptions) -> jax.Array:
    """Return a number of every token, or top_k of them, before the first shard."""
    dims = (tokens, options.top_k) if name in OF_ENTRIES and options.top_k else (tokens,)
    return jnp.full(dims, _UNREACHED.get(name, 0), jnp.int32 if name in _INTEGERS else dtype)

"""Causal attention a block of queries at a time, with recompute: no [tokens, tokens] array outlives its block."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention_output"  # the name of the result, for policies of `jax.checkpoint`
# Queries in a block: on a CPU the scores of longer blocks leave the cache (1.5 to 3 times the time at 256).
BLOCK_TOKENS = 64
# Shorter blocks where one block's float32 scores would pass this. Backward holds about four such arrays.
SCORE_BYTES = 64 * 2**20
# A run of blocks is one loop and has one static number of keys. In a single run half of the products meet future keys,
# which the mask drops; in n runs 1 / (n + 1) do. Every run is compiled by itself, so their number is small, and
# larger only for contexts whose products take longer than the compiler.
MIN_RUNS, MAX_RUNS = 4, 8
RUN_TOKENS = 1024


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, block_tokens: int | None = None) -> jax.Array:
    """Softmax attention of every query over the keys up to its own position.

    softmax(q k^T / sqrt(d)) v, with grouped heads: query head i reads key head i // (heads / kv_heads). Scores exist
    for one block of queries at a time, in forward and (recomputed) in backward.

    Args:
        q: [batch, tokens, heads, d].
        k, v: [batch, tokens, kv_heads, d], dtype of q; kv_heads divides heads.
        block_tokens: queries in a block, >= 1; None is BLOCK_TOKENS, or fewer to stay within SCORE_BYTES.
    Returns:
        [batch, tokens, heads, d], dtype of q, under the name ATTENTION.
    Numerics: scores, softmax and the sums over query blocks of dk and dv in float32; the probabilities are rounded to
        the dtype of q before their product with v.
    Memory: about 16 * batch * heads * block_tokens * tokens bytes, and a float32 copy of k and v.
    Source: Rabe and Staats 2021, self-attention does not need O(n^2) memory; here without splitting the keys.
    """
    batch, tokens, heads, d = q.shape
    kv_heads = k.shape[2]
    block = block_tokens or _block_tokens(batch, tokens, heads)
    # The loops below add up dk and dv in the dtype these two have here, so they enter in float32.
    keys, values = (jnp.swapaxes(a, 1, 2).astype(_wide(a.dtype)) for a in (k, v))
    queries = jnp.moveaxis(q.reshape(batch, tokens, kv_heads, heads // kv_heads, d), 1, 2)
    # The ragged block comes first in token order, where it has the fewest keys.
    ragged, blocks = tokens % block, tokens // block
    y = []
    if ragged:
        y.append(_block_attention(keys[:, :, :ragged], values[:, :, :ragged], queries[:, :, :ragged], jnp.int32(0)))
    blocks_in_run = math.ceil(blocks / _runs(tokens))
    for first in range(0, blocks, max(blocks_in_run, 1)):
        count = min(blocks_in_run, blocks - first)
        start, stop = ragged + first * block, ragged + (first + count) * block
        y.append(_run(keys[:, :, :stop], values[:, :, :stop], queries[:, :, start:stop], start, block))
    return checkpoint_name(jnp.moveaxis(jnp.concatenate(y, axis=2), 2, 1).reshape(q.shape), ATTENTION)


def _block_tokens(batch: int, tokens: int, heads: int) -> int:
    """BLOCK_TOKENS, or the largest power of two whose scores fit SCORE_BYTES; at least 8, at most the tokens."""
    fitting = max(8, SCORE_BYTES // (4 * batch * heads * max(tokens, 1)))
    return max(1, min(tokens, BLOCK_TOKENS, 2 ** (fitting.bit_length() - 1)))


def _runs(tokens: int) -> int:
    return min(MAX_RUNS, max(MIN_RUNS, tokens // RUN_TOKENS))


def _run(keys: jax.Array, values: jax.Array, queries: jax.Array, start: int, block: int) -> jax.Array:
    """Return equal blocks of queries in one rolled loop; queries: [batch, kv_heads, count * block, group, d]."""
    count = queries.shape[2] // block
    if count == 1:
        return _block_attention(keys, values, queries, jnp.int32(start))
    cut = queries.reshape(*queries.shape[:2], count, block, *queries.shape[3:])
    starts = start + block * jnp.arange(count, dtype=jnp.int32)
    y = lax.map(lambda each: _block_attention(keys, values, *each), (jnp.moveaxis(cut, 2, 0), starts))
    return jnp.moveaxis(y, 0, 2).reshape(queries.shape)


@jax.checkpoint
def _block_attention(keys: jax.Array, values: jax.Array, queries: jax.Array, start: jax.Array) -> jax.Array:
    """Return one block: queries [batch, kv_heads, block, group, d] at positions start .. over all the given keys."""
    dtype = queries.dtype
    block, keys_seen = queries.shape[2], keys.shape[2]
    product = partial(jnp.einsum, preferred_element_type=_wide(dtype), precision=precision_of(dtype))
    scores = product("bnqgd,bnkd->bnqgk", queries, keys.astype(dtype)) * queries.shape[-1] ** -0.5
    position = start + jnp.arange(block, dtype=jnp.int32)
    visible = position[:, None] >= jnp.arange(keys_seen, dtype=jnp.int32)[None, :]
    scores = jnp.where(visible[None, None, :, None, :], scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(dtype)
    return product("bnqgk,bnkd->bnqgd", probabilities, values.astype(dtype)).astype(dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of sums: float32, or float64 where everything is."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 products are IEEE float32 on every device; shorter types have one kind of product."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None

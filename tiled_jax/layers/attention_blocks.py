"""Blocks of attention: rows of heads, the products of a block of queries and a block of keys, and how long a block is.

Letters: B sequences, N query heads, n key heads, g = N / n, d features of a head, b tokens of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiled_jax.core.products import wide

# Tokens of a block at most, and the bytes of one array of scores in float32, of which a backward holds about four.
BLOCK_TOKENS = {"cpu": 256, "gpu": 1024}
SCORE_BYTES = 64 * 2**20


class Gradients(NamedTuple):
    """dq in the dtype of q, dk and dv in the wide one."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def block_tokens(batch: int, tokens: int, heads: int, device: str) -> int:
    """Return the largest power of two within BLOCK_TOKENS whose scores fit SCORE_BYTES; at least 8, at most the tokens."""
    fitting = int((SCORE_BYTES / (4 * max(1, batch * heads))) ** 0.5)
    return max(1, min(tokens, BLOCK_TOKENS[device], max(8, 2 ** (max(1, fitting).bit_length() - 1))))


class Scoring(NamedTuple):
    """How scores are made of products. Static.

    scale: None is d**-0.5. softcap: c tanh(score / c) replaces a score; None: as it is.
    """

    scale: float | None = None
    softcap: float | None = None


PLAIN = Scoring()


class Blocks:
    """Blocks of b rows of one call's arrays [B, tokens, heads, ...], and their products in the wide dtype."""

    def __init__(self, q: jax.Array, k: jax.Array, block: int, how: Scoring) -> None:
        self.batch, _, heads, d = q.shape
        self.dtype, self.acc, self.block = q.dtype, wide(q.dtype), block
        self.kv_heads, self.group = k.shape[2], heads // k.shape[2]
        self.scale, self.softcap = d**-0.5 if how.scale is None else how.scale, how.softcap
        self.small = (self.batch, self.kv_heads, self.group, block)
        # Below every score, and a number: a row that sees nothing yet is as if it had seen nothing, and not NaN.
        self.lowest = float(np.finfo(self.acc).min)
        self._precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def rows(self, a: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, start, self.block, 1)

    def set_rows(self, a: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(a, rows, start, 1)

    def add_rows(self, a: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
        return self.set_rows(a, self.rows(a, start) + rows, start)

    def product(self, terms: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(terms, a, b, preferred_element_type=self.acc, precision=self._precision)

    def grouped(self, a: jax.Array) -> jax.Array:
        """Return [B, b, N, d] as [B, n, g, b, d]."""
        return jnp.moveaxis(a.reshape(*a.shape[:2], self.kv_heads, self.group, a.shape[-1]), 1, 3)

    def flat(self, a: jax.Array) -> jax.Array:
        """Return [B, n, g, b, ...] as [B, b, N, ...]."""
        return jnp.moveaxis(a, 3, 1).reshape(self.batch, self.block, -1, *a.shape[4:])

    def scores(self, queries: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        """Return the scores [B, n, g, b, b] of two blocks: -inf where `seen`, [b, b] or [B, b, b], is False."""
        found = self.product("bngqd,bknd->bngqk", self.grouped(queries), keys) * self.scale
        if self.softcap is not None:
            found = self.softcap * jnp.tanh(found / self.softcap)
        return jnp.where(seen if seen.ndim == 2 else seen[:, None, None], found, -jnp.inf)

    def gradients_of_products(self, scores: jax.Array, d: jax.Array) -> jax.Array:
        """Return the gradient of q k^T in the dtype of q, 0 where nothing is seen; d: that of the scores."""
        unseen = jnp.isneginf(scores)
        if self.softcap is not None:
            d = d * (1 - jnp.square(jnp.where(unseen, 0, scores) / self.softcap))
        return jnp.where(unseen, 0, d * self.scale).astype(self.dtype)

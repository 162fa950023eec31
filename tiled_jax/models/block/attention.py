"""Causal attention over pairs of a block of queries and a block of keys, forward and backward written out.

Beside its operands it makes nothing whose size grows with the tokens but the output, the log-sum-exp of each query, and the
float32 sums of dk and dv: the gradient of the queries is written over the queries. For a caller that has a backward of its
own, such as `models.block`; `attention.causal_attention` is the one with derivatives.
Letters: B sequences of S tokens, N query heads, n key heads, g = N / n, d features of a head, b tokens of a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import vary_over, varying_of
from tiled_jax.core.products import wide

# Tokens of a block at most, and the bytes of one array of scores [B, N, b, b] in float32.
BLOCK_TOKENS = {"cpu": 256, "gpu": 1024}
SCORE_BYTES = 64 * 2**20


class Gradients(NamedTuple):
    """dq in the dtype of q, dk and dv in the wide one."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def block_tokens(batch: int, tokens: int, heads: int, device: str) -> int:
    """The largest power of two within BLOCK_TOKENS whose scores fit SCORE_BYTES; at least 8, at most the tokens."""
    fitting = int((SCORE_BYTES / (4 * max(1, batch * heads))) ** 0.5)
    return max(1, min(tokens, BLOCK_TOKENS[device], max(8, 2 ** (max(1, fitting).bit_length() - 1))))


def forward(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return softmax(q k^T / sqrt(d)) v over the keys up to each query's position, and the log of the softmax's sums.

    Args:
        q: [B, S, N, d]. k, v: [B, S, n, d], dtype of q. block: b, at most S.
    Returns:
        [B, S, N, d], dtype of q; [B, S, N] in the wide dtype.
    Numerics: scores, softmax and sums are float32; exponentials are rounded to the dtype of q before their product with v.
    """
    pairs, acc = _Pairs(q, k, block), wide(q.dtype)
    types = varying_of((q, k, v))

    def step(at: "_At", carry: Any) -> Any:
        highest, total, sums, y, lse = carry
        scores = pairs.scores(at, pairs.rows(q, at.i), k)
        highest = jnp.where(at.j == 0, -jnp.inf, highest)
        found = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights, shrunk = jnp.exp(scores - found[..., None]), jnp.exp(highest - found)
        total = total * shrunk + jnp.sum(weights, axis=-1)
        part = pairs.product("bngqk,bknd->bngqd", weights.astype(q.dtype), pairs.rows(v, at.j))
        sums = sums * shrunk[..., None] + part
        y = pairs.set_rows(y, pairs.flat(sums / total[..., None]).astype(q.dtype), at.i)
        lse = pairs.set_rows(lse, pairs.flat(found + jnp.log(total)), at.i)
        return found, total, sums, y, lse

    small = pairs.small
    carry = (
        jnp.full(small, -jnp.inf, acc),
        jnp.zeros(small, acc),
        jnp.zeros((*small, q.shape[-1]), acc),
        jnp.zeros_like(q),
        jnp.zeros(q.shape[:-1], acc),
    )
    *_, y, lse = pairs.each(step, carry, types)
    return y, lse


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array, delta: jax.Array, dy: jax.Array, block: int
) -> Gradients:
    """Return the gradients of `forward`'s operands. delta: [B, S, N], the sum of y dy over a head's features; lse, dy as y.

    Numerics: as forward; probabilities and gradients of scores are rounded to the dtype of q before their products, and sums
    over blocks are float32.
    """
    pairs, acc = _Pairs(q, k, block), wide(q.dtype)
    types = varying_of((q, k, v, lse, delta, dy))

    def step(at: "_At", carry: Any) -> Any:
        dq, queries, dk, dv = carry
        # Rows of `queries` in front of this block are gradients by now; `own` leaves out those that lie in two blocks.
        own = pairs.own(at)
        # The barrier makes them rows of their own: XLA would read them from what is written over, and copy all of that first.
        of_block, dy_block = barrier(pairs.rows(queries, at.i)), pairs.grouped(pairs.rows(dy, at.i))
        scores = pairs.scores(at, of_block, k, own)
        lse_block, delta_block = (pairs.grouped(pairs.rows(a, at.i)[..., None]) for a in (lse, delta))
        p = jnp.exp(scores - lse_block)
        dp = pairs.product("bngqd,bknd->bngqk", dy_block, pairs.rows(v, at.j))
        ds = jnp.where(jnp.isneginf(scores), 0, p * (dp - delta_block) * pairs.scale).astype(q.dtype)
        p = p.astype(q.dtype)
        keys = pairs.rows(k, at.j)
        dq = jnp.where(at.j == 0, 0, dq) + pairs.product("bngqk,bknd->bngqd", ds, keys)
        dk = pairs.add_rows(dk, pairs.product("bngqk,bngqd->bknd", ds, pairs.grouped(of_block)), at.j)
        dv = pairs.add_rows(dv, pairs.product("bngqk,bngqd->bknd", p, dy_block), at.j)
        done = (at.j == at.i) & own[None, :, None, None]
        queries = pairs.set_rows(queries, jnp.where(done, pairs.flat(dq).astype(q.dtype), of_block), at.i)
        return dq, queries, dk, dv

    carry = (jnp.zeros((*pairs.small, q.shape[-1]), acc), q, jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc))
    _, dq, dk, dv = pairs.each(step, carry, types)
    return Gradients(dq, dk, dv)


class _At(NamedTuple):
    """Block i of the queries and block j <= i of the keys."""

    i: jax.Array
    j: jax.Array


class _Pairs:
    """The pairs of blocks of one call, in the order of the queries, and what a pair reads and writes.

    The last block ends with the tokens, and so begins inside the one before it where b does not divide S.
    """

    def __init__(self, q: jax.Array, k: jax.Array, block: int) -> None:
        self.batch, self.tokens, heads, d = q.shape
        self.kv_heads, self.block = k.shape[2], block
        self.group, self.scale, self._acc = heads // self.kv_heads, d**-0.5, wide(q.dtype)
        self.small = (self.batch, self.kv_heads, self.group, block)
        self._precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def each(self, step: Callable[[_At, Any], Any], carry: Any, types: Any) -> Any:
        """The carry after every pair, in one rolled loop of a known length."""
        blocks = -(-self.tokens // self.block)

        def body(_: Any, state: Any) -> Any:
            i, j, carry = state
            carry = jax.tree.map(lambda a: vary_over(a, types), step(_At(i, j), carry))
            last = j == i
            return jnp.where(last, i + 1, i), jnp.where(last, 0, j + 1), carry

        state = (jnp.int32(0), jnp.int32(0), jax.tree.map(lambda a: vary_over(a, types), carry))
        return lax.fori_loop(0, blocks * (blocks + 1) // 2, body, state)[2]

    def _start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * self.block, self.tokens - self.block)

    def _positions(self, i: jax.Array) -> jax.Array:
        return self._start(i) + jnp.arange(self.block, dtype=jnp.int32)

    def own(self, at: _At) -> jax.Array:
        """[b], which rows of the block of queries do not lie in the one before."""
        return self._positions(at.i) >= at.i * self.block

    def rows(self, a: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, self._start(i), self.block, 1)

    def set_rows(self, a: jax.Array, rows: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(a, rows, self._start(i), 1)

    def add_rows(self, a: jax.Array, rows: jax.Array, i: jax.Array) -> jax.Array:
        return self.set_rows(a, self.rows(a, i) + rows, i)

    def product(self, terms: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(terms, a, b, preferred_element_type=self._acc, precision=self._precision)

    def grouped(self, a: jax.Array) -> jax.Array:
        """[B, b, N, d] -> [B, n, g, b, d]."""
        return jnp.moveaxis(a.reshape(*a.shape[:2], self.kv_heads, self.group, a.shape[-1]), 1, 3)

    def flat(self, a: jax.Array) -> jax.Array:
        """[B, n, g, b, ...] -> [B, b, N, ...]."""
        return jnp.moveaxis(a, 3, 1).reshape(self.batch, self.block, -1, *a.shape[4:])

    def scores(self, at: _At, queries: jax.Array, k: jax.Array, own: jax.Array | None = None) -> jax.Array:
        """[B, n, g, b, b]: -inf for keys behind the query, in the block before theirs, or of queries that are not `own`."""
        found = self.product("bngqd,bknd->bngqk", self.grouped(queries), self.rows(k, at.j)) * self.scale
        places, keys = self._positions(at.i), self._positions(at.j)
        seen = (places[:, None] >= keys[None, :]) & (keys >= at.j * self.block)[None, :]
        seen = seen if own is None else seen & own[:, None]
        return jnp.where(seen, found, -jnp.inf)

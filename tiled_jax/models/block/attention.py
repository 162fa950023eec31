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
from tiled_jax.core.loops import vary_over, varying_of, zeros_after
from tiled_jax.core.products import wide
from tiled_jax.layers.attention_blocks import PLAIN, Blocks, Gradients, Scoring


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block: int,
    first: jax.Array | None = None,
    mask: jax.Array | None = None,
    how: Scoring = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Return softmax(scale q k^T) v over the keys up to each query's position, and the log of the softmax's sums.

    Args:
        q: [B, S, N, d]. k, v: [B, S, n, d], dtype of q. block: b, at most S.
        first: [B or 1, S] integers, the first key that each query sees; None: that of the sequence.
        mask: [B or 1, S] of booleans, the keys that others than the query in their place see; None: all.
        how: the scale and the cap of scores.
    Returns:
        [B, S, N, d], dtype of q; [B, S, N] in the wide dtype.
    Numerics: scores, softmax and sums are float32; exponentials are rounded to the dtype of q before their product with v.
    """
    pairs, acc = _Pairs(q, k, block, first, mask, how), wide(q.dtype)
    types = varying_of((q, k, v, *(a for a in (first, mask) if a is not None)))

    def step(at: "_At", carry: Any) -> Any:
        highest, total, sums, y, lse = carry
        scores = pairs.scores(pairs.rows(q, at.queries), pairs.rows(k, at.keys), pairs.seen(at))
        highest = jnp.where(at.j == 0, pairs.lowest, highest)
        found = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights, shrunk = jnp.exp(scores - found[..., None]), jnp.exp(highest - found)
        total = total * shrunk + jnp.sum(weights, axis=-1)
        part = pairs.product("bngqk,bknd->bngqd", weights.astype(q.dtype), pairs.rows(v, at.keys))
        sums = sums * shrunk[..., None] + part
        y = pairs.set_rows(y, pairs.flat(sums / total[..., None]).astype(q.dtype), at.queries)
        lse = pairs.set_rows(lse, pairs.flat(found + jnp.log(total)), at.queries)
        return found, total, sums, y, lse

    small = pairs.small
    carry = (
        jnp.full(small, pairs.lowest, acc),
        jnp.zeros(small, acc),
        jnp.zeros((*small, q.shape[-1]), acc),
        zeros_after(q, q.shape, q.dtype),
        zeros_after(q, q.shape[:-1], acc),
    )
    *_, y, lse = pairs.each(step, carry, types)
    return y, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dy: jax.Array,
    block: int,
    first: jax.Array | None = None,
    mask: jax.Array | None = None,
    how: Scoring = PLAIN,
) -> Gradients:
    """Return the gradients of `forward`'s operands. delta: [B, S, N], the sum of y dy over a head's features; lse, dy as y.

    Numerics: as forward; probabilities and gradients of scores are rounded to the dtype of q before their products, and sums
    over blocks are float32.
    """
    pairs, acc = _Pairs(q, k, block, first, mask, how), wide(q.dtype)
    types = varying_of((q, k, v, lse, delta, dy, *(a for a in (first, mask) if a is not None)))

    def step(at: "_At", carry: Any) -> Any:
        dq, queries, dk, dv = carry
        # Rows of `queries` in front of this block are gradients by now; `own` leaves out those that lie in two blocks.
        own = pairs.own(at)
        # The barrier makes them rows of their own: XLA would read them from what is written over, and copy all of that first.
        of_block, dy_block = barrier(pairs.rows(queries, at.queries)), pairs.grouped(pairs.rows(dy, at.queries))
        keys = pairs.rows(k, at.keys)
        scores = pairs.scores(of_block, keys, pairs.seen(at, own))
        lse_block, delta_block = (pairs.grouped(pairs.rows(a, at.queries)[..., None]) for a in (lse, delta))
        p = jnp.exp(scores - lse_block)
        dp = pairs.product("bngqd,bknd->bngqk", dy_block, pairs.rows(v, at.keys))
        ds = pairs.gradients_of_products(scores, p * (dp - delta_block))
        p = p.astype(q.dtype)
        dq = jnp.where(at.j == 0, 0, dq) + pairs.product("bngqk,bknd->bngqd", ds, keys)
        dk = pairs.add_rows(dk, pairs.product("bngqk,bngqd->bknd", ds, pairs.grouped(of_block)), at.keys)
        dv = pairs.add_rows(dv, pairs.product("bngqk,bngqd->bknd", p, dy_block), at.keys)
        done = (at.j == at.i) & own[None, :, None, None]
        queries = pairs.set_rows(queries, jnp.where(done, pairs.flat(dq).astype(q.dtype), of_block), at.queries)
        return dq, queries, dk, dv

    keys = zeros_after(dy, k.shape, acc), zeros_after(dy, v.shape, acc)
    carry = (jnp.zeros((*pairs.small, q.shape[-1]), acc), q, *keys)
    _, dq, dk, dv = pairs.each(step, carry, types)
    return Gradients(dq, dk, dv)


class _At(NamedTuple):
    """Block i of the queries and block j <= i of the keys, and the rows that these begin with."""

    i: jax.Array
    j: jax.Array
    queries: jax.Array
    keys: jax.Array


class _Pairs(Blocks):
    """The pairs of blocks of one call, in the order of the queries, and what a pair reads and writes.

    The last block ends with the tokens, and so begins inside the one before it where b does not divide S.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        block: int,
        first: jax.Array | None,
        mask: jax.Array | None,
        how: Scoring,
    ) -> None:
        super().__init__(q, k, block, how)
        self.tokens, self._first, self._mask = q.shape[1], first, mask

    def each(self, step: Callable[["_At", Any], Any], carry: Any, types: Any) -> Any:
        """Return the carry after every pair, in one rolled loop of a known length."""
        blocks = -(-self.tokens // self.block)

        def body(_: Any, state: Any) -> Any:
            i, j, carry = state
            at = _At(i, j, self._start(i), self._start(j))
            carry = jax.tree.map(lambda a: vary_over(a, types), step(at, carry))
            last = j == i
            return jnp.where(last, i + 1, i), jnp.where(last, 0, j + 1), carry

        state = (jnp.int32(0), jnp.int32(0), jax.tree.map(lambda a: vary_over(a, types), carry))
        return lax.fori_loop(0, blocks * (blocks + 1) // 2, body, state)[2]

    def _start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * self.block, self.tokens - self.block)

    def _positions(self, start: jax.Array) -> jax.Array:
        return start + jnp.arange(self.block, dtype=jnp.int32)

    def own(self, at: "_At") -> jax.Array:
        """[b], which rows of the block of queries do not lie in the one before."""
        return self._positions(at.queries) >= at.i * self.block

    def seen(self, at: "_At", own: jax.Array | None = None) -> jax.Array:
        """[b, b], or [B, b, b]: not the keys behind the query, in the block before theirs, or before its first one.

        With `own` nothing for queries that are not.
        """
        places, keys = self._positions(at.queries), self._positions(at.keys)
        seen = (places[:, None] >= keys[None, :]) & (keys >= at.j * self.block)[None, :]
        seen = seen if own is None else seen & own[:, None]
        if self._first is not None:
            seen = seen & (keys[None, None, :] >= self.rows(self._first, at.queries)[:, :, None])
        if self._mask is not None:
            itself = places[:, None] == keys[None, :]
            seen = seen & (self.rows(self._mask, at.keys)[:, None, :] | itself[None])
        return seen

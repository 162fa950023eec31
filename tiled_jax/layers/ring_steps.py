"""Ring attention, forward and backward written out: what a device computes in each of the R steps, and what it sends on.

For use inside `jax.shard_map`. Letters: R devices of the axis, B sequences of S tokens, N query heads, n key heads, d features
of a head. A sequence is 2 R runs of tokens, and device r holds run r and run 2 R - 1 - r: of a causal mask every device
then has as much in every one of the R steps, half of what there would be without a mask. A step's products do not wait for
the keys and values of the next one, which are on their way meanwhile.

Source: Liu et al. 2023, Ring Attention, arXiv 2310.01889; the order of the runs: Brandon et al. 2023, Striped Attention,
arXiv 2311.09431, and the "zigzag" of its successors; the sums over blocks: Dao 2023, FlashAttention-2, arXiv 2307.08691.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.collectives.conjugates import Axis
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import vary_over, varying_of, zeros_after
from tiled_jax.layers.attention_blocks import PLAIN, Blocks, Gradients, Scoring

RingCarry = Any
KeySums = tuple[jax.Array, jax.Array]  # of dk and dv


class _Passed(NamedTuple):
    """Keys and values of the device whose turn it is."""

    k: jax.Array
    v: jax.Array


class _Pair(NamedTuple):
    """The first rows of a block of queries and of a block of keys; [b, b] or [B, b, b], which keys each query sees."""

    queries: jax.Array
    keys: jax.Array
    seen: jax.Array


Step = Callable[[_Pair, RingCarry, _Passed], RingCarry]


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis: Axis,
    block: int,
    first: jax.Array | None = None,
    how: Scoring = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Return attention of this device's queries, and the log of the softmax's sums.

    Args:
        q: [B, S / R, N, d], tokens of two runs. k, v: [B, S / R, n, d], dtype of q. block: tokens of a block, at most S / 2 R.
        first: [B or 1, S / R] integers, the place in the sequence of the first key that each query sees; None: the first one.
        how: the scale and the cap of scores.
    Returns:
        [B, S / R, N, d], dtype of q; [B, S / R, N] in the wide dtype.
    """
    ring = _Ring(q, k, axis, block, how, first)

    def step(pair: _Pair, carry: RingCarry, passed: _Passed) -> RingCarry:
        y, lse = carry
        scores = ring.scores(ring.rows(q, pair.queries), ring.rows(passed.k, pair.keys), pair.seen)
        # Rows of their own: XLA would read them from what is written over, and copy all of that first.
        y_before, lse_before = barrier((ring.rows(y, pair.queries), ring.rows(lse, pair.queries)))
        y_before, lse_before = ring.grouped(y_before), ring.grouped(lse_before[..., None])[..., 0]
        # What there is counts as one key more, of the score `lse_before` and the value `y_before`.
        highest = jnp.maximum(lse_before, jnp.max(scores, axis=-1))
        weights, kept = jnp.exp(scores - highest[..., None]), jnp.exp(lse_before - highest)
        total = kept + jnp.sum(weights, axis=-1)
        part = ring.product("bngqk,bknd->bngqd", weights.astype(q.dtype), ring.rows(passed.v, pair.keys))
        found = (y_before * kept[..., None] + part) / total[..., None]
        y = ring.set_rows(y, ring.flat(found), pair.queries)
        return y, ring.set_rows(lse, ring.flat(highest + jnp.log(total)), pair.queries)

    passed = ring.typed(_Passed(k, v))
    carry = zeros_after(q, (*q.shape[:-1], v.shape[-1]), ring.acc), jnp.full(q.shape[:-1], ring.lowest, ring.acc)
    ahead = ring.sent(passed)
    carry = ring.own(step, ring.typed(carry), passed)

    def hop(turn: jax.Array, state: tuple[_Passed, RingCarry]) -> tuple[_Passed, RingCarry]:
        passed, carry = state
        ahead = ring.sent(passed)
        return ahead, ring.others(turn, step, carry, passed)

    if axis.size > 2:
        ahead, carry = lax.fori_loop(1, axis.size - 1, hop, (ahead, carry))
    if axis.size > 1:
        carry = ring.others(axis.size - 1, step, carry, ahead)
    return carry[0].astype(q.dtype), carry[1]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dy: jax.Array,
    axis: Axis,
    block: int,
    first: jax.Array | None = None,
    how: Scoring = PLAIN,
) -> Gradients:
    """Return the gradients of `forward`'s operands. delta: [B, S / R, N], the sum of y dy over a head's features; lse, dy as y.

    The sums of dk and dv follow their keys round, one step behind them, begun by the first of the other devices, and are sent
    home by the last one, where they are added to its own.
    """
    ring = _Ring(q, k, axis, block, how, first, lse, delta, dy)

    def step(pair: _Pair, carry: RingCarry, passed: _Passed) -> RingCarry:
        dq, dk, dv = carry
        queries, keys = ring.rows(q, pair.queries), ring.rows(passed.k, pair.keys)
        dy_block = ring.grouped(ring.rows(dy, pair.queries))
        scores = ring.scores(queries, keys, pair.seen)
        lse_block, delta_block = (ring.grouped(ring.rows(a, pair.queries)[..., None]) for a in (lse, delta))
        p = jnp.exp(scores - lse_block)
        dp = ring.product("bngqd,bknd->bngqk", dy_block, ring.rows(passed.v, pair.keys))
        ds = ring.gradients_of_products(scores, p * (dp - delta_block))
        of_queries = ring.product("bngqk,bknd->bngqd", ds, keys)
        dq = ring.add_rows(dq, ring.flat(of_queries), pair.queries)
        of_keys = ring.product("bngqk,bngqd->bknd", ds, ring.grouped(queries))
        dk = ring.add_rows(dk, of_keys, pair.keys)
        dv = ring.add_rows(dv, ring.product("bngqk,bngqd->bknd", p.astype(q.dtype), dy_block), pair.keys)
        return dq, dk, dv

    def fresh() -> tuple[jax.Array, jax.Array]:
        return ring.typed((zeros_after(dy, k.shape, ring.acc), zeros_after(dy, v.shape, ring.acc)))

    passed = ring.typed(_Passed(k, v))
    ahead = ring.sent(passed)
    dq, *own = ring.own(step, (ring.typed(zeros_after(dy, q.shape, ring.acc)), *fresh()), passed)
    if axis.size == 1:
        return Gradients(dq.astype(q.dtype), *own)

    def turned(turn: Any, dq: jax.Array, passed: _Passed) -> tuple[jax.Array, KeySums]:
        dq, *sums = ring.others(turn, step, (dq, *fresh()), passed)
        return dq, tuple(sums)

    def added(arrived: KeySums, sums: KeySums) -> KeySums:
        return jax.tree.map(jnp.add, arrived, sums)

    def hop(turn: Any, state: tuple[_Passed, jax.Array, KeySums]) -> tuple[_Passed, jax.Array, KeySums]:
        passed, dq, sums = state
        ahead, arrived = ring.sent(passed), ring.sent(sums)
        dq, sums = turned(turn, dq, passed)
        return ahead, dq, added(arrived, sums)

    last = axis.size - 1
    if last > 1:
        passed, ahead = ahead, ring.sent(ahead)
        dq, sums = turned(1, dq, passed)
        if last > 2:
            ahead, dq, sums = lax.fori_loop(2, last, hop, (ahead, dq, sums))
        arrived = ring.sent(sums)
        dq, sums = turned(last, dq, ahead)
        sums = added(arrived, sums)
    else:
        dq, sums = turned(last, dq, ahead)
    return Gradients(dq.astype(q.dtype), *added(ring.sent(sums), tuple(own)))


class _Ring(Blocks):
    """One call: which pairs of blocks a device computes when it is given the keys of another, and what is sent on.

    The last block of a run ends with it, and so begins inside the one before where b does not divide the run.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        axis: Axis,
        block: int,
        how: Scoring,
        first: jax.Array | None,
        *more: jax.Array,
    ) -> None:
        super().__init__(q, k, block, how)
        self.axis, self.run = axis, q.shape[1] // 2
        self._first = first
        self._types = varying_of((q, k, *(() if first is None else (first,)), *more)) | (
            {axis.name} if axis.typed else set()
        )

    def typed(self, arrays: Any) -> Any:
        return jax.tree.map(lambda a: vary_over(a, self._types), arrays)

    def sent(self, arrays: Any) -> Any:
        """Return what the device before this one has."""
        size = self.axis.size
        if size == 1:
            return arrays
        ring = [(device, (device + 1) % size) for device in range(size)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis.name, ring), arrays)

    def own(self, step: Step, carry: RingCarry, passed: _Passed) -> RingCarry:
        """Return the carry after the pairs of this device's queries and keys up to them: its runs are in token order."""
        tokens, here = 2 * self.run, self.axis.index.astype(jnp.int32)
        blocks = -(-tokens // self.block)

        def pair(i: jax.Array, j: jax.Array) -> _Pair:
            queries, keys = self._start(i, tokens), self._start(j, tokens)
            causal = self._rows_of(queries)[:, None] >= self._rows_of(keys)[None, :]
            return self._pair(queries, keys, causal & self._once(i, queries, j, keys), here)

        return self._each(blocks * (blocks + 1) // 2, lambda i: i, pair, step, carry, passed)

    def others(self, turn: Any, step: Step, carry: RingCarry, passed: _Passed) -> RingCarry:
        """Return the carry after this device's queries with the keys that were `turn` devices before it, of device s.

        The queries of the later run see all keys of run s, which is an early one. Beside that either those of the earlier
        run do, where s comes before this device, or those of the later run see the keys of run 2 R - 1 - s as well.
        """
        blocks, here, turn = -(-self.run // self.block), self.axis.index.astype(jnp.int32), jnp.asarray(turn, jnp.int32)
        chosen = jnp.where(here >= turn, 0, self.run)
        owner = (here - turn) % self.axis.size

        def pair(i: jax.Array, j: jax.Array) -> _Pair:
            second, i = i // blocks, i % blocks
            queries, keys = self._start(i, self.run), self._start(j, self.run)
            once = self._once(i, queries, j, keys)
            from_queries, from_keys = jnp.where(second == 0, self.run, chosen), jnp.where(second == 0, 0, chosen)
            return self._pair(from_queries + queries, from_keys + keys, once, owner)

        return self._each(2 * blocks * blocks, lambda i: blocks - 1, pair, step, carry, passed)

    def _pair(self, queries: jax.Array, keys: jax.Array, seen: jax.Array, owner: jax.Array) -> _Pair:
        """A pair, without the keys of device `owner` that come before the first one that a query sees."""
        if self._first is None:
            return _Pair(queries, keys, seen)
        row = self._rows_of(keys)
        mirror = (2 * self.axis.size - 1 - owner) * self.run
        place = jnp.where(row < self.run, owner * self.run + row, mirror + row - self.run)
        of_queries = self.rows(self._first, queries)
        return _Pair(queries, keys, seen & (place[None, None, :] >= of_queries[:, :, None]))

    def _each(
        self,
        count: int,
        last_of: Callable[[jax.Array], Any],
        pair: Callable[[jax.Array, jax.Array], _Pair],
        step: Step,
        carry: RingCarry,
        passed: _Passed,
    ) -> RingCarry:
        """Return the carry after `count` pairs of block i of queries and blocks 0 .. last_of(i) of keys, in one rolled loop."""

        def body(_: Any, state: Any) -> Any:
            i, j, carry = state
            carry = self.typed(step(pair(i, j), carry, passed))
            last = j == last_of(i)
            return jnp.where(last, i + 1, i), jnp.where(last, 0, j + 1), carry

        return lax.fori_loop(0, count, body, (jnp.int32(0), jnp.int32(0), self.typed(carry)))[2]

    def _start(self, i: jax.Array, tokens: int) -> jax.Array:
        return jnp.minimum(i * self.block, tokens - self.block)

    def _rows_of(self, start: jax.Array) -> jax.Array:
        return start + jnp.arange(self.block, dtype=jnp.int32)

    def _once(self, i: jax.Array, queries: jax.Array, j: jax.Array, keys: jax.Array) -> jax.Array:
        """[b, b], of blocks i and j that begin with these rows: not those rows that lie in the block before, too."""
        own = self._rows_of(queries) >= i * self.block
        return own[:, None] & (self._rows_of(keys) >= j * self.block)[None, :]

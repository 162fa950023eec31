"""Tokens that are split over a mesh axis, one shard at a time: gathered before its turn, its partial sums handed back.

Gathered shard i is every device's own shard i side by side, R t rows. While one computes, the next one is on its way: it is
in the carry of the loop, so that nothing the loop computes has to wait for it, and no more than these two are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.errors import fail, fail_type
from shared_specs.shards import ShardPlan
from tiled_jax.core.loops import Body, vary_over, varying
from tiled_jax.core.turns import turns

# Where steps of a ring are taken: on TPUs, whose compiler runs permutes beside products, of products with enough rows to
# hide one. Compiled ahead of time for four H200s (jax 0.11.2, H 4096, I 14336, t 2048) XLA starts the gathers and the
# reduce-scatters of the plain form before a product and ends them after it, and puts one of a ring's three steps beside one.
RING_BACKENDS, RING_ROWS = ("tpu",), 512

_rows = lax.dynamic_slice_in_dim

Gathered = Any  # a pytree of [R t, ...]


@dataclass(frozen=True)
class TokenAxis:
    """The mesh axis over which tokens are split.

    Args:
        name: of the axis of the surrounding `jax.shard_map`. ranks: R.
        ring: partial sums that have nothing to hide behind go around a ring, each step beside a product.
    """

    name: str
    ranks: int
    ring: bool = False

    @classmethod
    def of(cls, name: str, shard_tokens: int) -> "TokenAxis":
        """Return the axis, for shards of so many of a device's own tokens."""
        ranks = lax.axis_size(name)
        pays = jax.default_backend() in RING_BACKENDS and shard_tokens >= RING_ROWS
        return cls(name, ranks, ring=ranks > 1 and pays)

    def gather(self, own: Any) -> Gathered:
        """Return a pytree of [t, ...], this device's rows -> [R t, ...], the rows of all devices in their order."""
        if self.ranks == 1:
            return own
        return jax.tree.map(lambda a: lax.all_gather(self.differing(a), self.name, axis=0, tiled=True), own)

    def own(self, a: jax.Array) -> jax.Array:
        """[R t, ...] -> [t, ...], this device's rows."""
        if self.ranks == 1:
            return a
        t = a.shape[0] // self.ranks
        return _rows(self.differing(a), lax.axis_index(self.name) * t, t)

    def scatter(self, partial: jax.Array) -> jax.Array:
        """Return [R t, H], a part of a sum over devices -> [t, H], this device's rows of the sum, in the same dtype."""
        if self.ranks == 1:
            return partial
        return lax.psum_scatter(self.differing(partial), self.name, scatter_dimension=0, tiled=True)

    def scatter_product(
        self, rows: jax.Array, product: Callable[[jax.Array], jax.Array], dtype: jnp.dtype
    ) -> jax.Array:
        """`scatter` of product(rows) [R t, H] in `dtype`, of rows [R t, I]; the product is in the wide dtype.

        As a ring: the sum of a device's rows comes by every other device and ends at home, [t, H] at a time, and while it
        is on its way the next device computes what it will add.
        """
        if not self.ring:
            return self.scatter(product(rows).astype(dtype))
        ranks, t, here = self.ranks, rows.shape[0] // self.ranks, lax.axis_index(self.name)
        rows = self.differing(rows)
        onward = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        total = None
        for step in range(ranks):  # at the last step a device has its own rows
            part = product(_rows(rows, (here + ranks - 1 - step) % ranks * t, t))
            if total is not None:
                part += lax.ppermute(total, self.name, onward).astype(part.dtype)
            total = part.astype(dtype)
        assert total is not None
        return total

    def differing(self, a: jax.Array) -> jax.Array:
        """Return a with the type of something that differs along the axis, which collectives ask for."""
        return vary_over(a, varying(lax.axis_index(self.name)))


def axis_ranks(function: str, axis_name: Any) -> int:
    """Return the devices of an axis of the surrounding `jax.shard_map`; SpecError where there is no such axis."""
    if not isinstance(axis_name, str):
        fail_type(function, "axis_name", "the name of a mesh axis", type(axis_name).__name__)
    try:
        return lax.axis_size(axis_name)
    except NameError:
        advice = "Call it inside jax.shard_map over a mesh with that axis."
        fail(function, "axis_name", "an axis of the surrounding jax.shard_map", repr(axis_name), advice=advice)


def for_each_gathered(
    plan: ShardPlan,
    kept_start: int,
    fetch: Callable[[Any, int], Gathered],
    recomputed: Body[Any],
    kept: Body[Any],
    carry: Any,
) -> Any:
    """carry = body.run(start, tokens, (gathered, carry)) for every shard, as `loops.for_each_shard` but in token order.

    fetch(start, tokens) is the gathered shard. The last shard, the only one that may be shorter, runs first. The loops
    gather one shard too many, the one behind the last; that one is hidden too, and leaving it out would take a second
    copy of the loop's body and of its buffers. XLA cuts the first turn of a loop with collectives off and may run it beside the
    shard before, with the buffers of both alive at once; waiting for the carry keeps them apart.
    `after` of a body is given the gathered shard instead of the start.
    """
    if len(plan) == 0:
        return carry
    t, last = plan.shard_tokens, len(plan) - 1
    first_kept = min(-(-kept_start // t), len(plan))
    ahead: Gathered = fetch(last * t, plan.tokens - last * t)
    following: Gathered = fetch(0, t) if last else None
    carry = (recomputed if last < first_kept else kept).run(last * t, plan.tokens - last * t, (ahead, carry))
    ahead = following
    for body, start, stop in ((recomputed, 0, min(first_kept, last)), (kept, first_kept, last)):

        def step(i: Any, state: tuple[Gathered, Any], body: Body[Any] = body) -> tuple[Gathered, Any]:
            following = fetch(jnp.minimum(i + 1, last - 1) * t, t)
            return following, body.run(i * t, t, state)

        if start >= stop:
            continue
        state = body.after(ahead, carry)
        if stop - start == 1:
            ahead = fetch(stop * t, t) if stop < last else None
            carry = body.run(start * t, t, state)
        else:
            ahead, carry = lax.fori_loop(start, stop, step, state)
    return carry


def for_each_of_first_gathered(
    plan: ShardPlan, tokens: jax.Array, fetch: Callable[[Any, int], Gathered], run: Callable[..., Any], carry: Any
) -> Any:
    """carry = run(start, tokens, gathered, carry) of the shards that the first `tokens` [] of a device's own tokens are in.

    As `turns.for_each_of_first`; `tokens` is the same on all devices of the axis, which meet in every turn, and on all that
    could wait for one of them. The next shard is gathered ahead, so that one more is gathered than is run.
    """
    t = plan.shard_tokens
    whole, rest = divmod(plan.tokens, t)
    if rest:
        reached = (tokens > whole * t).astype(jnp.int32)
        carry = turns(lambda _, carry: run(whole * t, rest, fetch(whole * t, rest), carry), reached, 1, carry)
    if not whole:
        return carry

    def step(i: Any, state: tuple[Gathered, Any]) -> tuple[Gathered, Any]:
        ahead, carry = state
        following = fetch(jnp.minimum(i + 1, whole - 1) * t, t)
        return following, run(i * t, t, ahead, carry)

    needed = jnp.minimum(lax.div(tokens + (t - 1), jnp.int32(t)), whole)
    return turns(step, needed, whole, (fetch(0, t), carry))[1]


def most_of_all(count: jax.Array) -> jax.Array:
    """Return the largest count of all devices of the surrounding `jax.shard_map`: one reduction of one number."""
    mesh = jax.sharding.get_abstract_mesh()
    typed = any(varying(lax.axis_index(name)) for name in mesh.manual_axes)
    axes = varying(count) if typed else frozenset(mesh.manual_axes)
    return lax.pmax(count, tuple(sorted(axes))) if axes else count

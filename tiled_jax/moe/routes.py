"""Which rows every expert computes of one shard: the pairs of a token and an expert, in the order of the experts.

Letters: t tokens of the shard, k experts of a token, n = t k pairs, E experts, b rows of a block, which has rows of one expert
alone. Pair p is token p // k.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shared_specs.moe.costs import block_count


class Routes(NamedTuple):
    """The places of a shard, in whole blocks for each expert.

    pairs, tokens: of every place; n and t, behind the last ones, where it is empty. sizes: [E], the places of each expert.
    experts: of every block. blocks: [], how many of them are filled, the first ones.
    """

    pairs: jax.Array
    tokens: jax.Array
    sizes: jax.Array
    experts: jax.Array
    blocks: jax.Array


def routes_of(index: jax.Array, experts: int, rows: int) -> Routes:
    """Return the routes of a choice [t, k]. rows: b."""
    flat, n, each = index.reshape(-1), index.size, index.shape[1]
    most = block_count(n, experts, rows)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    sizes = -(-counts // rows) * rows
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    places = jnp.arange(most * rows, dtype=jnp.int32)
    passed = jnp.cumsum(jnp.zeros(most * rows + 1, jnp.int32).at[stops].add(1), dtype=jnp.int32)
    expert = jnp.minimum(passed[:-1], experts - 1)  # of every place; behind the last route the last one
    offset = places - (stops - sizes)[expert]
    there = (places < stops[-1]) & (offset < counts[expert])
    pairs = jnp.where(there, order[jnp.minimum(first[expert] + offset, n - 1)], n)
    return Routes(pairs, pairs // each, sizes, expert[::rows], stops[-1] // rows)

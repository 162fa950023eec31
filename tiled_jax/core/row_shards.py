"""Which rows of tokens a shard of a loop has: a run of them, or those that count before the others.

Of rows that add nothing to any sum and have no gradient, a loop over those that count first may stop behind the last of these.
What it has not reached keeps the values that the results have there anyway.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.config import EVERY_ROW_OUTPUTS
from tiled_jax.core.loops import vary_over, varying
from tiled_jax.core.own_tokens import Split


def may_stop_early(outputs: Collection[str], targets: jax.Array, axis: str | None, split: Split | None) -> bool:
    """Return whether a loop may stop behind the last row that counts, of a device's own tokens or of devices that meet in it.

    Not where something is asked for of every row. Where `axis` of a `shard_map` splits the vocabulary devices agree on the most
    turns first. Not where others that meet in the loop, since XLA may cut the work of a turn over axes that are left to it or a
    partitioner splits the vocabulary, could have different tokens: one would wait for ever.
    """
    if {*EVERY_ROW_OUTPUTS} & {*outputs}:
        return False
    mesh = jax.sharding.get_abstract_mesh() if split is None else split.mesh
    manual = {*mesh.manual_axes} | (set() if split is None else {*split.manual})
    left_to_xla = manual and any(mesh.shape[name] > 1 for name in mesh.axis_names if name not in manual)
    if axis is None and not left_to_xla:
        return True
    if split is not None:
        return not split.token_axes
    if not left_to_xla:
        return True
    typed = any(varying(lax.axis_index(name)) for name in manual)
    if typed:
        return not varying(targets)
    return all(mesh.shape[name] == 1 for name in manual - {axis})


def counted_first(ignored: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rows [T] in the order of their work, those not ignored first, each kind in its own order, and how many they
    are."""
    tokens = ignored.shape[0]
    row = vary_over(jnp.arange(tokens, dtype=jnp.int32), varying(ignored))
    order = lax.sort(jnp.where(ignored, row + tokens, row))
    return jnp.where(order < tokens, order, order - tokens), jnp.sum(~ignored, dtype=jnp.int32)


def rows_of(a: jax.Array, place: Any, size: int) -> jax.Array:
    """Return so many rows. place: the first of them, or all of them [size]."""
    if jnp.ndim(place) == 0:
        return lax.dynamic_slice_in_dim(a, place, size)
    a, place = _alike(a, place)
    return a.at[place].get(mode="promise_in_bounds", unique_indices=True)


def with_rows(a: jax.Array, values: jax.Array, place: Any) -> jax.Array:
    """Return a with these rows in their place."""
    if jnp.ndim(place) == 0:
        return lax.dynamic_update_slice_in_dim(a, values, place, 0)
    a, place = _alike(a, place)
    return a.at[place].set(values, mode="promise_in_bounds", unique_indices=True)


def _alike(a: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both, varying wherever one of them does."""
    return vary_over(a, varying(place)), vary_over(place, varying(a))

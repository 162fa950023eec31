"""Which rows of x a shard of the loss has: a run of them, or those with a label before the others.

A row without a label adds nothing to any sum and has no gradient, so a loop over the rows with a label first may stop behind
the last of them. What it has not reached keeps the values that the results have there anyway.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.config import EVERY_ROW_OUTPUTS, LossOptions
from tiled_jax.core.loops import vary_over, varying
from tiled_jax.core.own_tokens import Split

# Of a row that was not reached: above every logit, so that its probabilities are zero and everything made of them finite.
_UNREACHED = {"top": 1e18, "total": 1.0}
# What there are top_k of for every token; entries of the vocabulary.
OF_ENTRIES, _INTEGERS = ("top_logprobs", "top_indices"), ("prediction", "top_indices")


def may_stop_early(outputs: Collection[str], targets: jax.Array, axis: str | None, split: Split | None) -> bool:
    """Return whether a loop may stop behind the last label of a device's own tokens.

    Not where something is asked for of every row. Nor where devices that meet in the loop, since `axis` splits the vocabulary
    or since XLA may cut the work of a turn over axes that are left to it, could have different tokens: one would wait for ever.
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
    typed = any(varying(lax.axis_index(name)) for name in manual)
    if typed:
        return not varying(targets)
    return all(mesh.shape[name] == 1 for name in manual - {axis})


def valid_first(targets: jax.Array, ignore_index: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows [T] in the order of their work, those with a label first, each kind in its own order, and how many have
    one."""
    tokens, ignored = targets.shape[0], targets == ignore_index
    row = vary_over(jnp.arange(tokens, dtype=jnp.int32), varying(targets))
    order = lax.sort(jnp.where(ignored, row + tokens, row))
    return jnp.where(order < tokens, order, order - tokens), jnp.sum(~ignored, dtype=jnp.int32)


def before_first(name: str, tokens: int, dtype: Any, options: LossOptions) -> jax.Array:
    """Return a number of every token, or top_k of them, before the first shard."""
    dims = (tokens, options.top_k) if name in OF_ENTRIES and options.top_k else (tokens,)
    return jnp.full(dims, _UNREACHED.get(name, 0), jnp.int32 if name in _INTEGERS else dtype)


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

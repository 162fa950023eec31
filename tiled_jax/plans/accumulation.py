"""Gradients of a step in micro-batches, as one device of a mesh adds them up inside `jax.shard_map`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.core.loops import vary_over, varying
from tiled_jax.core.products import wide
from tiled_jax.plans.variables import is_key

MicroBatchSums = Callable[[Any, Any, Any], tuple[jax.Array, jax.Array, Any]]


def mean_over_devices(total: jax.Array, count: jax.Array) -> jax.Array:
    """Return the sum of all devices' totals over that of their counts."""
    over = _over(total, count)
    if not over:
        return total / count
    return lax.psum(vary_over(total, over), over) / lax.psum(vary_over(count, over), over)


def _over(total: Any, count: Any) -> tuple[str, ...]:
    return tuple(sorted(varying(total) | varying(count)))


def accumulated(
    sums: MicroBatchSums, shared: Callable[[Any], Any], parameters: Any, batch: Any, variables: Any, parts: int
) -> tuple[jax.Array, Any, Any]:
    """Return the loss of a batch, its gradients and the variables after it, computed in so many equal parts.

    The loss is the sum of all parts over the count of all parts, whatever each has of it. A rolled loop adds gradients up in
    float32 (float64 for float64), rounded once to the dtype of the parameters; only then do devices add up those that are not
    scattered where they are computed.

    Args:
        sums: (parameters, part, variables) -> sum, count, variables after it.
        shared: of the parameters, what `sums` is given; its derivative is where devices meet.
        batch: arrays whose dim 0 is the sequence, a multiple of `parts`.
        variables: carried from part to part.
    """
    cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
    given, meet = jax.vjp(shared, parameters)
    first = jax.tree.map(lambda a: a[0], cut)
    total, count, variables = _typed(sums, given, first, variables)
    over = _over(total, count)
    # As small as the mean's gradients, so that 16 bits can hold them; a power of two rounds nothing.
    scale = 2.0 ** -math.ceil(math.log2(max(leaf.size for leaf in jax.tree.leaves(first))))

    def one(carry: tuple[Any, jax.Array, jax.Array, Any], part: Any) -> tuple[Any, None]:
        gradients, total, count, variables = carry

        def loss(given: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            found, counted, after = sums(given, part, variables)
            return vary_over(found, over), (vary_over(counted, over), after)

        found, pull, (counted, after) = jax.vjp(loss, given, has_aux=True)
        (d,) = pull(vary_over(jnp.full((), scale, found.dtype), over))
        added = jax.tree.map(lambda acc, d: acc + d.astype(acc.dtype), gradients, d)
        return (added, total + found, count + counted, after), None

    zeros = jax.tree.map(lambda w: vary_over(jnp.zeros(w.shape, wide(w.dtype)), varying(w)), given)
    nothing = vary_over(jnp.zeros((), total.dtype), over)
    (gradients, all_total, all_count, after), _ = lax.scan(one, (zeros, nothing, nothing, variables), cut)
    counted = lax.psum(all_count, over) if over else all_count

    def mean(acc: jax.Array, w: jax.Array) -> jax.Array:
        return (acc / (counted * jnp.asarray(scale, counted.dtype)).astype(acc.dtype)).astype(w.dtype)

    (gradients,) = meet(jax.tree.map(mean, gradients, given))
    return mean_over_devices(all_total, all_count), gradients, after


def _typed(sums: MicroBatchSums, given: Any, part: Any, variables: Any) -> tuple[Any, Any, Any]:
    """Types of a part's sum and count, and the variables with the types that they keep from part to part."""
    while True:
        total, count, after = jax.eval_shape(sums, given, part, variables)
        typed = jax.tree.map(lambda a, b: a if is_key(a) else vary_over(a, varying(b)), variables, after)
        same = [varying(a) == varying(b) for a, b in zip(*map(jax.tree.leaves, (typed, variables)), strict=True)]
        if all(same):
            return total, count, typed
        variables = typed

"""Rows of a decoder on one device of a mesh: where those of others come in, where sums are handed back, a run at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.collectives.api import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from tiled_jax.plans.data import Mapped


def entered(x: jax.Array, mapped: Mapped) -> jax.Array:
    """Return all rows, as the operand of products with this device's columns."""
    enter = gather_from_sequence_parallel_region if mapped.sequence_parallel else copy_to_tensor_parallel_region
    return _over_tensor_axis(enter, x, mapped)


def reduced(y: jax.Array, mapped: Mapped) -> jax.Array:
    """Return the sum over the tensor axis of what each device computed from its own rows of a weight; its own tokens of it."""
    split = mapped.sequence_parallel
    reduce = reduce_scatter_to_sequence_parallel_region if split else reduce_from_tensor_parallel_region
    return _over_tensor_axis(reduce, y, mapped)


def _over_tensor_axis(collective: Callable[..., jax.Array], a: jax.Array, mapped: Mapped) -> jax.Array:
    axis = mapped.axes.tensor
    return a if axis is None else collective(a, axis_name=axis)


def own_tokens_of(a: jax.Array, axis: str) -> jax.Array:
    """Return this device's run of the rows that all devices of the axis have."""
    rows = a.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(a, lax.axis_index(axis) * rows, rows)


def over_shards(fn: Callable[..., Any], x: jax.Array, t: int | None, *more: jax.Array) -> Any:
    """fn of runs of t entries along dim 1 of x, one after another and again in backward, its results side by side.

    t None: of everything at once. Results have the entries along dim 1 too.
    """
    arrays = (x, *more)
    if t is None or t >= x.shape[1]:
        return fn(*arrays)
    count, rest = divmod(x.shape[1], t)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a[:, : count * t].reshape(a.shape[0], count, t, *a.shape[2:]), 1, 0)

    def side_by_side(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], -1, *a.shape[3:])

    again = jax.checkpoint(fn)
    y = jax.tree.map(side_by_side, lax.map(lambda each: again(*each), tuple(map(cut, arrays))))
    if not rest:
        return y
    tail = again(*(a[:, count * t :] for a in arrays))
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), y, tail)

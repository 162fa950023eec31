"""What moves between the devices of the mesh axis that splits a layer's weights, a shard of tokens at a time.

A device has its columns of q, k and v, and with them of attention, for all tokens; rows of the layer's input and result it
has all, or with sequence parallelism its own run. Letters: T tokens, R devices, t a device's own tokens of a shard. A gathered
shard is every device's side by side, [R t, ...].
Values that are the same on all devices of the axis are typed as varying here, so that their derivatives are each device's own
part, added up once for a call: of what every device has whole only the first one's counts (`once`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.core.linear_call import Arrays
from tiled_jax.core.loops import vary_over
from tiled_jax.core.products import wide


@dataclass(frozen=True)
class Here:
    """The weights are whole: nothing moves."""

    ranks: int = 1  # that split the weights
    gathered: int = 1  # that split the rows
    split: bool = False

    def varied(self, operands: Arrays) -> Arrays:
        """Return operands whose derivatives are each device's part."""
        return operands

    def enter(self, rows: jax.Array) -> jax.Array:
        """Return the rows of all devices, as the operand of products with this one's columns."""
        return rows

    def leave(self, y: jax.Array) -> jax.Array:
        """Return this device's rows of the sum over the devices."""
        return y

    def once(self, a: jax.Array) -> jax.Array:
        return a

    def rows(self, a: jax.Array, start: Any, tokens: int) -> jax.Array:
        """Return a shard of what there is of all tokens."""
        return lax.dynamic_slice_in_dim(a, start, tokens, 0)

    def set_rows(self, a: jax.Array, rows: jax.Array, start: Any) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(a, rows, start, 0)

    def finished(self, y: jax.Array) -> jax.Array:
        """Return the sum over the devices of a result of which each has made a part."""
        return y


ONE_DEVICE = Here()


@dataclass(frozen=True)
class OverColumns(Here):
    """Every device has all tokens."""

    split: bool = True
    axis: str = ""

    def varied(self, operands: Arrays) -> Arrays:
        return {name: vary_over(a, (self.axis,)) for name, a in operands.items()}

    def leave(self, y: jax.Array) -> jax.Array:
        return vary_over(lax.psum(y.astype(wide(y.dtype)), self.axis).astype(y.dtype), (self.axis,))

    def once(self, a: jax.Array) -> jax.Array:
        return jnp.where(lax.axis_index(self.axis) == 0, a, jnp.zeros_like(a))

    def finished(self, y: jax.Array) -> jax.Array:
        return lax.psum(y, self.axis)


@dataclass(frozen=True)
class OverTokens(OverColumns):
    """Every device has its own run of the tokens."""

    def enter(self, rows: jax.Array) -> jax.Array:
        return lax.all_gather(rows, self.axis, axis=0, tiled=True)

    def leave(self, y: jax.Array) -> jax.Array:
        if wide(y.dtype) == y.dtype or self.ranks == 2:
            return lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)
        # The unrounded parts are exchanged and added in float32: a ring would round at every hop.
        parts = lax.all_to_all(y.reshape(self.ranks, -1, y.shape[-1]), self.axis, 0, 0, tiled=True)
        return jnp.sum(parts, axis=0, dtype=wide(y.dtype)).astype(y.dtype)

    def once(self, a: jax.Array) -> jax.Array:
        return a

    def rows(self, a: jax.Array, start: Any, tokens: int) -> jax.Array:
        cut = lax.dynamic_slice_in_dim(a.reshape(self.ranks, -1, *a.shape[1:]), start, tokens, 1)
        return cut.reshape(-1, *a.shape[1:])

    def set_rows(self, a: jax.Array, rows: jax.Array, start: Any) -> jax.Array:
        parts = rows.reshape(self.ranks, -1, *a.shape[1:])
        return lax.dynamic_update_slice_in_dim(a.reshape(self.ranks, -1, *a.shape[1:]), parts, start, 1).reshape(
            a.shape
        )

    def finished(self, y: jax.Array) -> jax.Array:
        return y


def block_ranks(axis: str | None, sequence_parallel: bool) -> Here:
    """Return what moves over an axis of the surrounding `jax.shard_map`; None: nothing."""
    if axis is None:
        return ONE_DEVICE
    ranks = lax.axis_size(axis)
    if sequence_parallel:
        return OverTokens(ranks=ranks, gathered=ranks, axis=axis)
    return OverColumns(ranks=ranks, axis=axis)

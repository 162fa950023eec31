"""Arrays between the devices of one mesh axis inside `jax.shard_map`: the pieces that the public collectives are made of.

Each is linear and differentiates to its exact transpose in both modes of `shard_map`. With check_vma=True a type says
whether an array is the same on all devices (invariant: it has one gradient, the same on all) or differs (varying: each
device has the gradient of its own). With check_vma=False there are no such types, and JAX's rule is that the gradient of an
array that is the same on all devices is the *sum* over devices of what each of them holds, a share. Both say the same, so
the functions follow the mode they are in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tiled_jax.collectives.gathered_tokens import axis_ranks
from tiled_jax.core.loops import vary_over, varying

Sizes = tuple[int, ...]
PART_OF_SUM = "part_of_sum"  # the name of what a reduce-scatter gives, for policies of `jax.checkpoint`


@dataclass(frozen=True)
class Axis:
    """The devices of one mesh axis, inside the `shard_map` that a public function is called in."""

    name: str
    size: int
    typed: bool  # check_vma=True

    @property
    def index(self) -> jax.Array:
        return lax.axis_index(self.name)


def mesh_axis(function: str, axis_name: object) -> Axis:
    """Return the axis; SpecError where no surrounding `shard_map` has it."""
    size = axis_ranks(function, axis_name)
    name = str(axis_name)
    return Axis(name, size, name in varying(lax.axis_index(name)))


def copy_to(x: jax.Array, axis: Axis) -> jax.Array:
    """Return x, of which each device uses a copy of its own: the gradients of the copies are added up."""
    if x.size == 0:
        return _nothing(x, axis, 0, x.shape[0], same=False)
    return vary_over(x, (axis.name,)) if axis.typed else x


def all_reduce(x: jax.Array, axis: Axis) -> jax.Array:
    """Return the sum over the devices, the same on all of them.

    Of one device too where there are types: only a sum makes an array invariant. XLA on a GPU removes it.
    """
    if x.size == 0:
        return _nothing(x, axis, 0, x.shape[0], same=True)
    if axis.size == 1 and not axis.typed:
        return x
    return lax.psum(copy_to(x, axis), axis.name)


def all_gather(x: jax.Array, axis: Axis, dim: int, *, same: bool) -> jax.Array:
    """Return all parts side by side along `dim`: `same` says that one gradient comes back, else one from each device."""
    if axis.size == 1:
        return all_reduce(x, axis) if same else copy_to(x, axis)
    if x.size == 0:
        return _nothing(x, axis, dim, x.shape[dim] * axis.size, same)
    # An invariant result is transposed to a slice, which loses the other devices' shares where there are no types.
    to = "invarying" if same and axis.typed else "varying"
    return lax.all_gather(copy_to(x, axis), axis.name, axis=dim, tiled=True, to=to)


def _nothing(x: jax.Array, axis: Axis, dim: int, size: int, same: bool) -> jax.Array:
    """Return the result without elements of an x without elements.

    XLA refuses to gather such an x, and its CPU compiler (jax 0.11.2) crashes where a program sums or cuts several.
    """
    shape = tuple(size if d == dim else n for d, n in enumerate(x.shape))
    axes = varying(x) - {axis.name} | ({axis.name} if axis.typed and not same else set())
    return vary_over(jnp.zeros(shape, x.dtype), axes)


def reduce_scatter(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Return this device's stretch, along `dim`, of the sum over the devices."""
    if axis.size == 1:
        return copy_to(x, axis)
    if x.size == 0:
        return _nothing(x, axis, dim, x.shape[dim] // axis.size, same=False)
    return checkpoint_name(
        lax.psum_scatter(copy_to(x, axis), axis.name, scatter_dimension=dim, tiled=True), PART_OF_SUM
    )


def take_part(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Return this device's stretch, along `dim`, of an x that all devices have."""
    if axis.size == 1:
        return copy_to(x, axis)
    if x.size == 0:
        return _nothing(x, axis, dim, x.shape[dim] // axis.size, same=False)
    if axis.typed and axis.name not in varying(x):
        return _take_part_once(axis, dim, x)
    return _stretch(axis, dim, x)


def _stretch(axis: Axis, dim: int, x: jax.Array) -> jax.Array:
    size = x.shape[dim] // axis.size
    return lax.dynamic_slice_in_dim(x, axis.index * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take_part_once(axis: Axis, dim: int, x: jax.Array) -> jax.Array:
    """`_stretch` of an invariant x. JAX's own transpose adds up padded stretches, this one gathers them: half is sent."""
    return _stretch(axis, dim, x)


def _take_part_once_forward(axis: Axis, dim: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _stretch(axis, dim, x), None


def _take_part_once_backward(axis: Axis, dim: int, _: None, d: jax.Array) -> tuple[jax.Array]:
    return (all_gather(d, axis, dim, same=True),)


_take_part_once.defvjp(_take_part_once_forward, _take_part_once_backward)


def pad_parts(x: jax.Array, dim: int, sizes: Sizes | None) -> jax.Array:
    """Return parts of `sizes` side by side along `dim`, each padded with zeros to the longest."""
    if sizes is None or len(set(sizes)) == 1:
        return x
    longest, parts = max(sizes), []
    for stop, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        part = lax.slice_in_dim(x, stop - size, stop, axis=dim)
        widths = [(0, longest - size) if d == dim else (0, 0) for d in range(x.ndim)]
        parts.append(jnp.pad(part, widths))
    return jnp.concatenate(parts, dim)


def unpad_parts(x: jax.Array, dim: int, sizes: Sizes | None) -> jax.Array:
    """Return the array that `pad_parts` was made of."""
    if sizes is None or len(set(sizes)) == 1:
        return x
    longest = max(sizes)
    spans = [(rank * longest, size) for rank, size in enumerate(sizes)]
    return jnp.concatenate([lax.slice_in_dim(x, at, at + size, axis=dim) for at, size in spans], dim)


def exchange_parts(x: jax.Array, axis: Axis, split: int, joined: int) -> jax.Array:
    """Return equal stretches of the dim `split`, one for each device, laid side by side along the dim `joined`."""
    x = copy_to(x, axis)
    return x if axis.size == 1 else lax.all_to_all(x, axis.name, split, joined, tiled=True)


def exchange_rows(x: jax.Array, axis: Axis, rows: Sequence[Sizes] | None) -> jax.Array:
    """Send `rows[r][s]` rows of dim 0, in order, from device r to device s. Return the rows received, in the order of r.

    Blocks are padded: every two devices exchange as many rows as the two that exchange most (None: equal parts). XLA has an
    exchange of uneven parts (`lax.ragged_all_to_all`), but none on a CPU.
    """
    if rows is None or len({size for row in rows for size in row}) == 1:
        return exchange_parts(x, axis, 0, 0)
    table = np.asarray(rows, np.int32)
    block = int(table.max())
    sent, received = _spread(table, axis, x.shape[0], block), _compact(table.T, axis, block)
    blocks = jnp.take(copy_to(x, axis), sent, axis=0, mode="fill", fill_value=0)
    blocks = lax.all_to_all(blocks, axis.name, 0, 0, tiled=True)
    return jnp.take(blocks, received, axis=0, mode="fill", fill_value=0)


def _spread(table: np.ndarray, axis: Axis, beyond: int, block: int) -> jax.Array:
    """Return, for every row of this device's padded blocks, the row of x that goes there; `beyond` where none does."""
    sizes = jnp.asarray(table)[axis.index]
    starts = jnp.asarray(np.cumsum(table, axis=1, dtype=np.int32) - table)[axis.index]
    row = jnp.arange(block, dtype=jnp.int32)
    return jnp.where(row < sizes[:, None], starts[:, None] + row, beyond).reshape(-1)


def _compact(table: np.ndarray, axis: Axis, block: int) -> jax.Array:
    """Return, for every row of this device's result, the row of the padded blocks that goes there, or one beyond them."""
    ends = jnp.asarray(np.cumsum(table, axis=1, dtype=np.int32))[axis.index]
    sizes = jnp.asarray(table)[axis.index]
    row = jnp.arange(int(table.sum(axis=1).max()), dtype=jnp.int32)
    source = jnp.sum(row[:, None] >= ends, axis=1, dtype=jnp.int32)
    at = jnp.minimum(source, axis.size - 1)
    return jnp.where(source < axis.size, at * block + row - (ends - sizes)[at], axis.size * block)

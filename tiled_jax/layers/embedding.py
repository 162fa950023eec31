"""An embedding table split over a mesh axis by vocabulary, as a function for use inside `jax.shard_map`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.collectives import checks as collective_checks
from shared_specs.collectives.partitions import vocab_partition
from shared_specs.core import checks
from shared_specs.errors import fail
from shared_specs.layers import checks as layer_checks
from shared_specs.shards import ShardPlan
from tiled_jax.collectives import conjugates
from tiled_jax.collectives.conjugates import mesh_axis
from tiled_jax.core.arrays import array, operand
from tiled_jax.core.loops import Body, Like, for_each, gradient_of, vary_like, zeros_after
from tiled_jax.core.products import product_of_rows, wide

# Tokens of one product with one-hot rows: long enough for a matrix unit, and a small array.
_ONE_HOT_TOKENS = 1024


def vocab_parallel_embedding(
    ids: jax.Array,
    weight: jax.Array,
    *,
    vocab_size: int | None = None,
    reduce_scatter_embeddings: bool = False,
    sequence_dim: int = 0,
    deterministic: bool = False,
    axis_name: str,
) -> jax.Array:
    """Return weight[ids] for a vocabulary that is split over the devices of an axis. Each device looks up its own entries, and
    the results are summed.

    Args:
        ids: [*tokens], int32 | int64, the same on all devices. The row of an id outside [0, V) is NaN.
        weight: [V / R, H], this device's entries, in the order of the devices.
        vocab_size: V; None: R times the entries of one device. If V is less, the last rows of the last devices are padding.
        reduce_scatter_embeddings: each device gets its own tokens, along sequence_dim, by a reduce-scatter.
        deterministic: gradients are bitwise equal in every run. XLA on a GPU adds the rows of equal ids in any order; True
            uses a product with one-hot rows instead, 2 T V / R H FLOP. On a CPU both orders are fixed.
        axis_name: of the surrounding `jax.shard_map`. Other axes may split the tokens.
    Returns:
        [*tokens, H] in the dtype of weight, the same on all devices, or this device's tokens of it.
    Numerics: exact; the gradient of weight is summed in float32 (float64 for float64) and rounded once.
    Memory: keeps ids for backward; a float32 gradient of weight.
    Raises:
        SpecError: wrong shapes or dtypes, tokens that do not divide, fewer entries than vocab_size, no such axis. TypeError: a
        wrong kind of value.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    Example:
        rows = jax.shard_map(
            partial(vocab_parallel_embedding, axis_name="tp"), mesh=mesh,
            in_specs=(P(), P("tp", None)), out_specs=P(),
        )(ids, weight)
    """
    name = "vocab_parallel_embedding"
    ids, weight = array(name, "ids", ids), array(name, "weight", weight)
    axis = mesh_axis(name, axis_name)
    layer_checks.check_ids(name, operand(ids), operand(weight))
    checks.check_count(name, "vocab_size", vocab_size)
    flags = {"reduce_scatter_embeddings": reduce_scatter_embeddings, "deterministic": deterministic}
    layer_checks.check_flags(name, **flags)
    dim, local, shape = 0, weight.shape[0], (*ids.shape, weight.shape[1])
    if reduce_scatter_embeddings:
        dim = collective_checks.check_dim(name, sequence_dim, ids.shape)
        collective_checks.check_even(name, ids.shape, dim, axis.size, sizes="")
    elif sequence_dim != 0:
        fail(name, "sequence_dim", "left out without reduce_scatter_embeddings", sequence_dim)
    vocab = vocab_partition(name, vocab_size, local, axis.size, 0).vocab
    known = (ids >= 0) & (ids < vocab)
    at = ids - (axis.index * local).astype(ids.dtype)
    mine = known & (at >= 0) & (at < local)
    found: Any = lookup(deterministic, jnp.where(mine, at, local).reshape(-1), weight)
    rows = found.reshape(shape)
    # Each device's own share of a NaN would be a NaN too; one is enough.
    rows = nan_unless(known[..., None], rows)
    if reduce_scatter_embeddings:
        return conjugates.reduce_scatter(rows, axis, dim)
    return conjugates.all_reduce(rows, axis)


@jax.custom_vjp
def nan_unless(known: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows of a `lookup`, NaN where they are not known. Their gradient is for `lookup` to leave out.

    That of `jnp.where` would be a choice between it and zeros of all rows, which XLA makes before the layers' backward.
    """
    return jnp.where(known, rows, jnp.full_like(rows, jnp.nan))


def _nan_unless_forward(known: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
    return nan_unless(known, rows), None


def _nan_unless_backward(_: None, d: jax.Array) -> tuple[None, jax.Array]:
    return None, d


nan_unless.defvjp(_nan_unless_forward, _nan_unless_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def lookup(deterministic: bool, at: jax.Array, weight: jax.Array) -> jax.Array:
    """weight[at], zeros where `at` is the number of rows."""
    return jnp.take(weight, at, axis=0, mode="fill", fill_value=0)


def _lookup_forward(deterministic: bool, at: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    # An array of no columns carries rows, dtype and type of the weight.
    return lookup(deterministic, at, weight), (at, weight[:, :0])


def _lookup_backward(deterministic: bool, saved: tuple[Any, ...], d: jax.Array) -> tuple[None, jax.Array]:
    at, like = saved
    shape = (like.shape[0], d.shape[1])
    total = vary_like(zeros_after(d, shape, wide(d.dtype)), d, at)
    if deterministic:
        total = _sum_by_products(total, at, d)
    else:
        total = total.at[at].add(d.astype(total.dtype), mode="drop")
    return None, gradient_of(Like.of(like), total)


lookup.defvjp(_lookup_forward, _lookup_backward)


def _sum_by_products(total: jax.Array, at: jax.Array, d: jax.Array) -> jax.Array:
    """total with each row of d added at its place, as products with one-hot rows: one order of summation."""
    places = jnp.arange(total.shape[0], dtype=at.dtype)

    def run(start: Any, tokens: int, total: jax.Array) -> jax.Array:
        places_of = lax.dynamic_slice_in_dim(at, start, tokens)
        rows = lax.dynamic_slice_in_dim(d, start, tokens)
        one_hot = (places_of[:, None] == places).astype(d.dtype)
        return total + product_of_rows(one_hot, rows, total.dtype)

    tokens = at.shape[0]
    plan = ShardPlan(tokens, min(_ONE_HOT_TOKENS, max(tokens, 1)))
    return for_each(plan, Body(run, lambda start, total: lax.optimization_barrier((start, total))), total)

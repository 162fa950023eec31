"""The two ends of the Llama decoder on one device of a mesh: rows of the embedding table, and the loss over the head.

Letters: T of a device's own tokens, H, V entries of the vocabulary, R devices of the axis that splits a parameter.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import LossOptions
from shared_specs.shards import ShardPlan
from tiled_jax.core.loops import Body, Like, for_each, gradient_of, vary_like, zeros_after
from tiled_jax.core.products import wide
from tiled_jax.layers.attention import precision_of
from tiled_jax.layers.embedding import lookup, nan_unless, vocab_parallel_embedding
from tiled_jax.loss.api import tiled_linear_cross_entropy
from tiled_jax.loss.ranks import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.models import Llama
from tiled_jax.models.loss import IGNORED
from tiled_jax.plans.data import Mapped, head_first
from tiled_jax.plans.decoder_tokens import entered, over_shards, own_tokens_of


def embedded(model: Llama, ids: jax.Array, shard: int | None, mapped: Mapped) -> jax.Array:
    """Return [T, H] rows of the table of a device's tokens, with all R T ids of its tensor axis; shard: see `over_shards`."""
    axis, place, state = mapped.axes.tensor, mapped.placements["embed", "embedding"], nnx.state(model.embed)
    if axis is None and mapped.reshards and place.shard_dim == -1:
        return _by_columns(_value(state, "embedding"), ids, mapped)
    table = _value(mapped.gather(state, ("embed",)), "embedding")
    if axis is None or place.tensor_dim is None:
        return _rows(table, own_tokens_of(ids, axis) if axis is not None and mapped.sequence_parallel else ids)
    ranks = 1 if shard is None else mapped.axes.size[axis]
    return _looked_up(_Lookup(axis, mapped.sequence_parallel, shard), ids.reshape(ranks, -1), table)


@dataclass(frozen=True)
class _Lookup:
    """How a table is looked up whose entries an axis splits; shard: see `over_shards`."""

    axis: str
    sequence_parallel: bool
    shard: int | None

    def __call__(self, ids: jax.Array, table: jax.Array) -> jax.Array:
        return vocab_parallel_embedding(
            ids.reshape(-1), table, reduce_scatter_embeddings=self.sequence_parallel, axis_name=self.axis
        )[None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looked_up(lookup: _Lookup, ids: jax.Array, table: jax.Array) -> jax.Array:
    """[T, H] rows, a shard of the ids at a time; the gradient of the table is summed in float32."""
    return over_shards(lambda ids: lookup(ids, table), ids, lookup.shard)[0]


def _looked_up_forward(lookup: _Lookup, ids: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _looked_up(lookup, ids, table), (ids, table)


def _looked_up_backward(lookup: _Lookup, saved: tuple[jax.Array, ...], d: jax.Array) -> tuple[None, jax.Array]:
    ids, table = saved
    tokens = ids.shape[1]
    t = tokens if lookup.shard is None else min(lookup.shard, tokens)

    def run(start: Any, count: int, total: jax.Array) -> jax.Array:
        of_shard = lax.dynamic_slice_in_dim(ids, start, count, 1)
        given = d if count == tokens else lax.dynamic_slice_in_dim(d, start, count)
        (found,) = jax.vjp(lambda table: lookup(of_shard, table), table)[1](given[None])
        return total + found.astype(total.dtype)

    # Not before the gradient is there: the sum is as large as the table, and would wait through the layers' backward.
    total = vary_like(zeros_after(d, table.shape, wide(table.dtype)), table, d)
    body = Body(run, lambda start, total: lax.optimization_barrier((start, total)))
    return None, gradient_of(Like.of(table), for_each(ShardPlan(tokens, max(t, 1)), body, total))


_looked_up.defvjp(_looked_up_forward, _looked_up_backward)


def _value(parameters: nnx.State, name: str) -> jax.Array:
    variable: Any = parameters[name]
    return variable.get_value()


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids], NaN where there is no such row."""
    known = (ids >= 0) & (ids < table.shape[0])
    rows: Any = lookup(False, jnp.where(known, ids, table.shape[0]), table)
    return nan_unless(known[:, None], rows)


def _by_columns(table: jax.Array, ids: jax.Array, mapped: Mapped) -> jax.Array:
    """Return [T, H] of a table [V, H / R]: every device looks its columns up for all devices' ids, and they are exchanged.

    No more is moved than the rows themselves, and neither the table nor its gradient is ever whole.
    """
    axes = mapped.axes.shard
    rows = _rows(table.astype(mapped.compute_dtype(table.dtype)), lax.all_gather(ids, axes, tiled=True))
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=1, tiled=True)


def head_loss(model: Llama, x: jax.Array, targets: jax.Array, mapped: Mapped) -> tuple[jax.Array, jax.Array]:
    """Sum and count over the rows; x: this device's, targets: of all devices of the tensor axis."""
    state = nnx.state(model.embed if model.head is None else model.head)
    axis, tensor = _vocab_axis(model, x, mapped), mapped.config.tensor
    if axis is not None:
        loss, count = _exchanged_head_loss, lax.psum(_counted(targets), axis)
    elif tensor is None or not tensor.loss_parallel:
        loss, count = _own_rows_loss, _counted(_own_targets(targets, mapped))
    else:
        loss, count = _own_entries_loss, _counted(targets)
    return head_first(partial(loss, model, targets, mapped), x, state), count


def _whole_head(model: Llama, state: Any, mapped: Mapped) -> jax.Array:
    whole = mapped.gather(state, ("embed",) if model.head is None else ("head",))
    return _value(whole, "embedding").T if model.head is None else _value(whole, "kernel")


def _own_entries_loss(model: Llama, targets: jax.Array, mapped: Mapped, x: jax.Array, state: Any) -> jax.Array:
    """Return the loss over the entries of the vocabulary that this device of the tensor axis has."""
    vocab, head = model.config.vocab_size, _whole_head(model, state, mapped)
    axis: Any = mapped.axes.tensor
    if head.shape[1] == vocab:  # whole: a vocabulary that the axis does not divide
        head = _own_entries(head, axis)
    if model.plain:
        logits = _capped(model, jnp.dot(entered(x, mapped), head.astype(x.dtype), precision=precision_of(x.dtype)))
        return jnp.sum(vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab, axis_name=axis))
    if mapped.sequence_parallel:
        targets = own_tokens_of(targets, axis)
    return _split_loss(model, x, head, targets, mapped.sequence_parallel, axis)


def _split_loss(
    model: Llama, x: jax.Array, head: jax.Array, targets: jax.Array, sequence_parallel: bool, axis: str
) -> jax.Array:
    return vocab_parallel_linear_cross_entropy(
        x,
        head,
        targets,
        loss=_summed(model),
        tiling=model.loss_tiling,
        vocab_size=model.config.vocab_size,
        sequence_parallel=sequence_parallel,
        axis_name=axis,
    )


def _vocab_axis(model: Llama, x: jax.Array, mapped: Mapped) -> str | None:
    """Return the axis of sharded parameters over which the loss splits the vocabulary instead of gathering the head, or None.

    It gathers the tokens instead, and hands their gradients back: 2 R T H elements moved, against V H gathered and as many
    reduced. Where those are fewer, less is moved and kept; where they are more, there are 2 T > 2 V / R rows on every
    device, beside each layer's input of as many.
    """
    axes = [axis for axis in mapped.axes.shard if mapped.axes.size[axis] > 1]
    if model.plain or mapped.axes.tensor is not None or not mapped.reshards or len(axes) != 1:
        return None
    place = mapped.placements["embed", "embedding"] if model.head is None else mapped.placements["head", "kernel"]
    weights = jnp.dtype(mapped.compute_dtype(model.embed.embedding[...].dtype)).itemsize
    sums = weights if mapped.reduce_dtype is None else jnp.dtype(mapped.reduce_dtype).itemsize
    tokens = 2 * mapped.axes.size[axes[0]] * x.shape[0] * x.dtype.itemsize
    fewer = tokens <= model.config.vocab_size * (weights + sums)
    return axes[0] if fewer and place.shard_dim == (-1 if model.head is None else -2) else None


def _exchanged_head_loss(model: Llama, targets: jax.Array, mapped: Mapped, x: jax.Array, state: Any) -> jax.Array:
    """With this device's rows of the head [H / R, V] exchanged for entries of it, [H, V / R]."""
    axis = next(axis for axis in mapped.axes.shard if mapped.axes.size[axis] > 1)
    head = state["embedding"].get_value().T if model.head is None else state["kernel"].get_value()
    head = _padded(head.astype(mapped.compute_dtype(head.dtype)), mapped.axes.size[axis])
    head = lax.all_to_all(head, axis, split_axis=1, concat_axis=0, tiled=True)
    return _split_loss(model, x, head, targets, True, axis)


def _padded(head: jax.Array, ranks: int) -> jax.Array:
    """Pad to as many entries for every rank."""
    return jnp.pad(head, ((0, 0), (0, -head.shape[1] % ranks)))


def _own_entries(head: jax.Array, axis: str) -> jax.Array:
    """[H, V] -> [H, ceil(V / R)]; the last ones of the last devices are padding."""
    head = _padded(head, lax.axis_size(axis))
    entries = head.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(head, lax.axis_index(axis) * entries, entries, axis=1)


def _own_targets(targets: jax.Array, mapped: Mapped) -> jax.Array:
    axis = mapped.axes.tensor
    return targets if axis is None else own_tokens_of(targets, axis)


def _own_rows_loss(model: Llama, targets: jax.Array, mapped: Mapped, x: jax.Array, state: Any) -> jax.Array:
    """Return the loss of a device's own rows with the whole head, gathered over the tensor axis where it is split."""
    axis, head = mapped.axes.tensor, _whole_head(model, state, mapped)
    if axis is not None:
        if head.shape[1] != model.config.vocab_size:
            head = lax.all_gather(head, axis, axis=1, tiled=True)
        x = x if mapped.sequence_parallel else own_tokens_of(x, axis)
    targets = _own_targets(targets, mapped)
    if model.plain:
        logits = _capped(model, jnp.dot(x, head.astype(x.dtype), precision=precision_of(x.dtype))).astype(wide(x.dtype))
        valid = targets != IGNORED
        of_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[:, None], axis=-1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - of_target
        return jnp.sum(jnp.where(valid, nll, jnp.zeros_like(nll)))
    return tiled_linear_cross_entropy(x, head, targets, loss=_summed(model), tiling=model.loss_tiling)


def _summed(model: Llama) -> LossOptions:
    return LossOptions(reduction="sum", logit_softcap=model.config.logit_softcap)


def _capped(model: Llama, logits: jax.Array) -> jax.Array:
    cap = model.config.logit_softcap
    return logits if cap is None else (cap * jnp.tanh(logits.astype(wide(logits.dtype)) / cap)).astype(logits.dtype)


def _counted(targets: jax.Array) -> jax.Array:
    """Return how many of them are to be predicted."""
    return jnp.sum(targets != IGNORED)

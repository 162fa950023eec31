"""The two ends of the Llama decoder on one device of a mesh: rows of the embedding table, and the loss over the head.

Letters: T of a device's own tokens, H, V entries of the vocabulary, R devices of the axis that splits a parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import LossOptions
from tiled_jax.core.products import wide
from tiled_jax.layers.attention import precision_of
from tiled_jax.layers.embedding import lookup, nan_unless, vocab_parallel_embedding
from tiled_jax.loss.api import tiled_linear_cross_entropy
from tiled_jax.loss.ranks import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.models import Llama
from tiled_jax.models.loss import IGNORED
from tiled_jax.plans.data import Mapped
from tiled_jax.plans.decoder_tokens import entered, over_shards, own_tokens_of


def embedded(model: Llama, ids: jax.Array, shard: int | None, mapped: Mapped) -> jax.Array:
    """Return [T, H] rows of the table of a device's tokens, with all R T ids of its tensor axis; shard: see `over_shards`."""
    axis, place, state = mapped.axes.tensor, mapped.placements["embed", "embedding"], nnx.state(model.embed)
    if axis is None and mapped.reshards and place.shard_dim == -1:
        return _by_columns(_value(state, "embedding"), ids, mapped)
    table = _value(mapped.gather(state, ("embed",)), "embedding")
    if axis is None or place.tensor_dim is None:
        return _rows(table, own_tokens_of(ids, axis) if axis is not None and mapped.sequence_parallel else ids)
    summed = table.astype(wide(table.dtype))  # the shards' gradients

    def rows(ids: jax.Array) -> jax.Array:
        return vocab_parallel_embedding(
            ids.reshape(-1),
            summed.astype(table.dtype),
            reduce_scatter_embeddings=mapped.sequence_parallel,
            axis_name=axis,
        )[None]

    ranks = 1 if shard is None else mapped.axes.size[axis]
    return over_shards(rows, ids.reshape(ranks, -1), shard)[0]


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
    # Not before the layers are through: a tied table is gathered once for the tokens and once for the head.
    _, state = lax.optimization_barrier((x, nnx.state(model.embed if model.head is None else model.head)))
    vocab, tensor = model.config.vocab_size, mapped.config.tensor
    axis = _vocab_axis(model, x, mapped)
    if axis is not None:
        return _exchanged_head_loss(model, x, state, targets, axis, mapped)
    whole = mapped.gather(state, ("embed",) if model.head is None else ("head",))
    head = _value(whole, "embedding").T if model.head is None else _value(whole, "kernel")
    if tensor is None or not tensor.loss_parallel:
        return _own_rows_loss(model, x, head, targets, mapped)
    axis, count = tensor.axis, _counted(targets)
    if head.shape[1] == vocab:  # whole: a vocabulary that the axis does not divide
        head = _own_entries(head, axis)
    if model.plain:
        logits = _capped(model, jnp.dot(entered(x, mapped), head.astype(x.dtype), precision=precision_of(x.dtype)))
        return jnp.sum(vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab, axis_name=axis)), count
    if mapped.sequence_parallel:
        targets = own_tokens_of(targets, axis)
    return _split_loss(model, x, head, targets, mapped.sequence_parallel, axis), count


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


def _exchanged_head_loss(
    model: Llama, x: jax.Array, state: Any, targets: jax.Array, axis: str, mapped: Mapped
) -> tuple[jax.Array, jax.Array]:
    """With this device's rows of the head [H / R, V] exchanged for entries of it, [H, V / R]."""
    head = state["embedding"].get_value().T if model.head is None else state["kernel"].get_value()
    head = _padded(head.astype(mapped.compute_dtype(head.dtype)), mapped.axes.size[axis])
    head = lax.all_to_all(head, axis, split_axis=1, concat_axis=0, tiled=True)
    return _split_loss(model, x, head, targets, True, axis), lax.psum(_counted(targets), axis)


def _padded(head: jax.Array, ranks: int) -> jax.Array:
    """Pad to as many entries for every rank."""
    return jnp.pad(head, ((0, 0), (0, -head.shape[1] % ranks)))


def _own_entries(head: jax.Array, axis: str) -> jax.Array:
    """[H, V] -> [H, ceil(V / R)]; the last ones of the last devices are padding."""
    head = _padded(head, lax.axis_size(axis))
    entries = head.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(head, lax.axis_index(axis) * entries, entries, axis=1)


def _own_rows_loss(
    model: Llama, x: jax.Array, head: jax.Array, targets: jax.Array, mapped: Mapped
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of a device's own rows with the whole head, gathered over the tensor axis where it is split."""
    axis = mapped.axes.tensor
    if axis is not None:
        if head.shape[1] != model.config.vocab_size:
            head = lax.all_gather(head, axis, axis=1, tiled=True)
        x = x if mapped.sequence_parallel else own_tokens_of(x, axis)
        targets = own_tokens_of(targets, axis)
    if model.plain:
        logits = _capped(model, jnp.dot(x, head.astype(x.dtype), precision=precision_of(x.dtype))).astype(wide(x.dtype))
        valid = targets != IGNORED
        of_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[:, None], axis=-1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - of_target
        return jnp.sum(jnp.where(valid, nll, jnp.zeros_like(nll))), _counted(targets)
    return tiled_linear_cross_entropy(x, head, targets, loss=_summed(model), tiling=model.loss_tiling), _counted(
        targets
    )


def _summed(model: Llama) -> LossOptions:
    return LossOptions(reduction="sum", logit_softcap=model.config.logit_softcap)


def _capped(model: Llama, logits: jax.Array) -> jax.Array:
    cap = model.config.logit_softcap
    return logits if cap is None else (cap * jnp.tanh(logits.astype(wide(logits.dtype)) / cap)).astype(logits.dtype)


def _counted(targets: jax.Array) -> jax.Array:
    """Return how many of them are to be predicted."""
    return jnp.sum(targets != IGNORED)

"""Context parallelism: every device holds a run of the tokens of each sequence, and attends with some of the heads.

For use inside `jax.shard_map`. Letters: R devices of the axis, B sequences of S tokens, d features of a head. Everything
but attention and the loss's mean is token-wise and needs nothing from other devices. For attention one exchange turns
[S / R tokens, all heads] into [S tokens, heads / R], and another one turns the result back. The runs are in token order, and
every device has as much to compute.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.layers.heads import check_attention_shapes, context_heads
from shared_specs.layers.ring import Order, check_order
from shared_specs.plans.checks import check_context_tokens
from tiled_jax.collectives.conjugates import Axis, copy_to, exchange_parts, mesh_axis, take_part
from tiled_jax.core.arrays import array
from tiled_jax.layers.attention import causal_attention
from tiled_jax.layers.documents import documents_of_restarts, positions_in, shifted_labels

Attend = Callable[..., jax.Array]  # of q, k and v, and documents where there are any


def context_slice(
    batch: Mapping[str, Any],
    *,
    ignore_index: int = -100,
    order: Order = "tokens",
    axis_name: str | tuple[str, str],
) -> dict[str, Any]:
    """Return this device's part of the tokens of a batch, with the positions and the labels that belong to it.

    Args:
        batch: name -> [B or 1, S, ...], the same on every device of the axis. S is a multiple of R, and of 2 R for rings. None
            stays None. "documents" (runs of tokens with one number), or "position_ids" that restart, mark the documents that
            are packed into one sequence.
        ignore_index: the label of the last token of a sequence or of a document.
        order: "tokens" gives each device one run, in token order, for `context_attention`. "zigzag" gives each device two
            runs, for `ring_attention` (shared_specs.layers.ring.held_runs).
        axis_name: of the surrounding `jax.shard_map`. With "zigzag" it may be a pair (ring, inside): the devices of the inside
            axis share each place of the ring. It serves a `context_attention` over the inside axis whose `attend` is a
            `ring_attention` over the ring axis.
    Returns:
        name -> [B or 1, S / R, ...]. It adds "position_ids" [B or 1, S / R] int32, the positions in the whole sequence or in
        the document. If there are "labels", it also adds "shift_labels" [B, S / R], the label of every token. Labels are
        shifted before the split, so the last token of a run predicts the first of the next run.
    Raises:
        SpecError: arrays with different numbers of tokens, or with a number that does not divide; there is no such axis.
        TypeError: not a mapping of arrays.
    Example:
        mine = context_slice({"input_ids": ids, "labels": ids}, axis_name="cp")
        total = lax.psum(jnp.sum(losses(model(mine["input_ids"], mine["position_ids"]), mine["shift_labels"])), "cp")
    """
    name = "context_slice"
    pair = isinstance(axis_name, tuple)
    check_order(name, order, pair=pair)
    axis, *inside = (mesh_axis(name, each) for each in (axis_name if pair else (axis_name,)))
    within = inside[0] if inside else None
    given = _arrays(name, batch, order, axis, within)
    tokens = next(value.shape[1] for value in given.values() if value is not None)
    documents, positions, labels = (given.get(key) for key in ("documents", "position_ids", "labels"))
    if documents is None and positions is not None:
        documents = documents_of_restarts(positions)
    if labels is not None and given.get("shift_labels") is None:
        given["shift_labels"] = shifted_labels(labels, documents, ignore_index)
    if positions is None:
        places = jnp.arange(tokens, dtype=jnp.int32)[None]
        given["position_ids"] = places if documents is None else positions_in(documents)

    def cut(value: jax.Array | None) -> jax.Array | None:
        return None if value is None else runs_of(value, axis, within, order)

    return {key: cut(value) for key, value in given.items()}


def runs_of(value: jax.Array, axis: Axis, inside: Axis | None = None, order: Order = "zigzag") -> jax.Array:
    """Return this device's tokens of [B, S, ...], as shared_specs.layers.ring.held_runs deals them out."""
    if order == "tokens":
        return take_part(copy_to(value, axis), axis, 1)
    value, run = copy_to(value, axis), value.shape[1] // (2 * axis.size)
    starts = axis.index * run, (2 * axis.size - 1 - axis.index) * run
    held = jnp.concatenate([lax.dynamic_slice_in_dim(value, start, run, 1) for start in starts], axis=1)
    return held if inside is None else take_part(copy_to(held, inside), inside, 1)


def _arrays(function: str, batch: Any, order: Order, axis: Axis, inside: Axis | None) -> dict[str, jax.Array | None]:
    """Return the batch, whose arrays have as many tokens, which the devices divide."""
    if not isinstance(batch, Mapping):
        fail_type(function, "batch", "a mapping of arrays", type(batch).__name__)
    given = {key: None if value is None else array(function, f"batch[{key!r}]", value) for key, value in batch.items()}
    first = next(((key, value.shape) for key, value in given.items() if value is not None), None)
    if first is None:
        fail(function, "batch", "of one array or more", "none")
    for key, value in given.items():
        if value is not None and (value.ndim < 2 or value.shape[1] != first[1][1]):
            rule = f"of [sequences, {first[1][1] if len(first[1]) > 1 else 'tokens'}, ...]"
            fail(function, f"batch[{key!r}]", rule, show_shape(value.shape))
    within = 1 if inside is None else inside.size
    ranks = axis.size * within
    check_context_tokens(function, f"batch[{first[0]!r}]", first[1][1], ranks, first[1], order=order, inside=within)
    return given


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attend: Attend | None = None,
    *,
    documents: jax.Array | None = None,
    axis_name: str,
) -> jax.Array:
    """Attention of this device's tokens to those of all devices.

    `attend` gets all tokens, in order, for some of the heads. A function that computes each group of heads independently needs
    no change.

    Args:
        q: [B, S / R, heads, d]; R divides heads.
        k, v: [B, S / R, kv_heads, d or another dim], kv_heads a divisor of heads. If R does not divide kv_heads, the heads are
            repeated first, to the least common multiple of both.
        attend: (q, k, v) of all tokens -> [B, S, heads / R, dim of v]; None is causal softmax attention.
        documents: passed to `attend` as its argument of this name, unless None.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [B, S / R, heads, dim of v].
    Numerics: exchanges round nothing. The gradient of a repeated key head is the sum of its copies' gradients, in its own
        dtype.
    Memory: q, k, v and y of S tokens and heads / R. They are as large as this device's own, of S / R tokens and all heads (k
        and v times their repetitions).
    Raises:
        SpecError: shapes do not fit each other, R does not divide the heads, or there is no such axis.
    """
    name = "context_attention"
    axis = mesh_axis(name, axis_name)
    q, k, v = (array(name, key, value) for key, value in (("q", q), ("k", k), ("v", v)))
    check_heads(name, q, k, v)
    attend = attend or causal_attention
    dealt = context_heads(name, q.shape[2], k.shape[2], axis.size)
    if dealt.copies > 1:
        k, v = (jnp.repeat(x, dealt.copies, axis=2) for x in (k, v))
    more = {} if documents is None else {"documents": documents}
    y = attend(*(exchange_parts(x, axis, 2, 1) for x in (q, k, v)), **more)
    expected = (q.shape[0], axis.size * q.shape[1], dealt.query)
    if y.shape[:3] != expected:
        fail(name, "the result of attend", f"of shape {show_shape(expected)[:-1]}, ...]", show_shape(y.shape))
    return exchange_parts(y, axis, 1, 2)


def check_heads(function: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Check that q, k and v are [B, tokens, heads, d], of the same tokens, the key heads a divisor of the query heads.

    Raises:
        SpecError: they do not fit each other.
    """
    check_attention_shapes(function, ("B", "tokens", "heads", "d"), q.shape, k.shape, v.shape)

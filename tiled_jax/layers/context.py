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
from shared_specs.layers.heads import context_heads
from shared_specs.plans.checks import check_context_tokens
from tiled_jax.collectives.conjugates import Axis, mesh_axis, own, transposed
from tiled_jax.core.arrays import array
from tiled_jax.layers.attention import causal_attention

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def context_slice(batch: Mapping[str, Any], *, ignore_index: int = -100, axis_name: str) -> dict[str, Any]:
    """Return this device's run of the tokens of a batch, with the positions and the labels that belong to it.

    Args:
        batch: name -> [B or 1, S, ...], the same on every device of the axis, S a multiple of R; None stays None.
        ignore_index: what the last token of a sequence is to predict.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        name -> [B or 1, S / R, ...]. Beside what was given "position_ids" [1, S / R] int32, the places in the whole
        sequence, and, where there are "labels", "shift_labels" [B, S / R], what every token is to predict: shifted before
        the cut, so that the last token of a run predicts the first of the next one.
    Raises:
        SpecError: arrays of different numbers of tokens, or of a number that R does not divide, or there is no such axis.
        TypeError: no mapping of arrays.
    Example:
        mine = context_slice({"input_ids": ids, "labels": ids}, axis_name="cp")
        total = lax.psum(jnp.sum(losses(model(mine["input_ids"], mine["position_ids"]), mine["shift_labels"])), "cp")
    """
    name = "context_slice"
    axis = mesh_axis(name, axis_name)
    given = _arrays(name, batch, axis)
    labels = given.get("labels")
    if labels is not None and given.get("shift_labels") is None:
        given["shift_labels"] = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=ignore_index)
    tokens = next(value.shape[1] for value in given.values() if value is not None) // axis.size
    start = axis.index * tokens

    def cut(value: jax.Array | None) -> jax.Array | None:
        return None if value is None else lax.dynamic_slice_in_dim(own(value, axis), start, tokens, 1)

    found = {key: cut(value) for key, value in given.items()}
    if found.get("position_ids") is None:
        found["position_ids"] = (start + jnp.arange(tokens, dtype=start.dtype))[None]
    return found


def _arrays(function: str, batch: Any, axis: Axis) -> dict[str, jax.Array | None]:
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
    check_context_tokens(function, f"batch[{first[0]!r}]", first[1][1], axis.size, first[1])
    return given


def context_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, attend: Attend | None = None, *, axis_name: str
) -> jax.Array:
    """Attention of this device's tokens to those of all devices.

    `attend` sees all tokens, in order, of some heads: anything that computes each group of heads by itself needs no change.

    Args:
        q: [B, S / R, heads, d]; R divides heads.
        k, v: [B, S / R, kv_heads, d or another dim], kv_heads a divisor of heads. Where R does not divide kv_heads, they
            are repeated first, to the least common multiple of both.
        attend: (q, k, v) of all tokens -> [B, S, heads / R, dim of v]; None is causal softmax attention.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [B, S / R, heads, dim of v].
    Numerics: exchanges round nothing; a repeated key head's gradient is the sum of its copies', in its own dtype.
    Memory: q, k, v and y of S tokens and heads / R: as much as this device's own of S / R tokens and all heads (k and v, as
        often as they are repeated).
    Raises:
        SpecError: shapes that do not fit each other, heads that R does not divide, or there is no such axis.
    """
    name = "context_attention"
    axis = mesh_axis(name, axis_name)
    q, k, v = (array(name, key, value) for key, value in (("q", q), ("k", k), ("v", v)))
    _check_heads(name, q, k, v)
    attend = attend or causal_attention
    dealt = context_heads(name, q.shape[2], k.shape[2], axis.size)
    if dealt.copies > 1:
        k, v = (jnp.repeat(x, dealt.copies, axis=2) for x in (k, v))
    y = attend(*(transposed(x, axis, 2, 1) for x in (q, k, v)))
    expected = (q.shape[0], axis.size * q.shape[1], dealt.query)
    if y.shape[:3] != expected:
        fail(name, "the result of attend", f"of shape {show_shape(expected)[:-1]}, ...]", show_shape(y.shape))
    return transposed(y, axis, 1, 2)


def _check_heads(function: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            fail(function, name, "of shape [B, tokens, heads, d]", show_shape(x.shape))
    shapes = ", ".join(f"{name} is {show_shape(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if k.shape[2] != v.shape[2] or not k.shape[2] or q.shape[2] % k.shape[2]:
        rule = "heads whose number divides the query heads, as many for both"
        fail(function, "k, v", rule, f"{k.shape[2]} and {v.shape[2]}", shapes=shapes)
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        fail(function, "q, k, v", "of the same sequences and tokens, q and k of the same d", "others", shapes=shapes)

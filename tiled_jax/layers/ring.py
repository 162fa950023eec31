"""Ring attention: every device keeps the queries of its tokens, and the keys and values of all go round.

For use inside `jax.shard_map`, like `layers.context`, but for any number of heads. `layers.ring_steps` has the loops.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shared_specs.errors import fail, show_shape
from shared_specs.layers.heads import check_scores
from tiled_jax import backends
from tiled_jax.collectives.conjugates import Axis, copy_to, mesh_axis
from tiled_jax.core.arrays import array
from tiled_jax.core.loops import gradient_of, vary_over, varying_of
from tiled_jax.core.products import wide
from tiled_jax.layers import ring_steps
from tiled_jax.layers.attention import ATTENTION
from tiled_jax.layers.attention_blocks import Scoring, block_tokens
from tiled_jax.layers.context import check_heads, runs_of
from tiled_jax.layers.documents import checked_documents, first_in_window, first_keys

_NAME = "ring_attention"
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: jax.Array | None = None,
    axis_name: str,
) -> jax.Array:
    """Causal attention of this device's tokens to those of all devices. Keys and values travel around the ring.

    Args:
        q: [B, S / R, heads, d], of the tokens that `context_slice(..., order="zigzag")` gives this device: runs r and 2 R - 1
            - r of the 2 R runs of a sequence. Rotary positions are already applied.
        k, v: [B, S / R, kv_heads, d or another dim], kv_heads a divisor of heads.
        scale: of the scores; None is d**-0.5.
        window: the number of keys that a query sees, its own included, >= 1. Keys outside are multiplied and then left out.
            None: all earlier keys.
        softcap: c replaces each score by c tanh(score / c); None: scores are unchanged.
        documents: [B or 1, S] integers of the tokens of all devices, in sequence order, the same on every device. Each run of
            tokens with one number is a separate document. None: each sequence is one document.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [B, S / R, heads, dim of v], dtype of q, under the name `attention.ATTENTION`.
    Numerics: scores, softmax and sums are in float32 (float64 for float64), also the sums dk and dv, which are sent in it.
        Probabilities and gradients of scores are rounded to the dtype of q before their products.
    Memory: keeps q, k, v, y and the log-sum-exp of each query. It also holds keys and values twice (in backward three times,
        with their float32 sums) and the scores of one block of queries and one block of keys. Bytes sent:
        shared_specs.layers.ring.ring_bytes.
    Raises:
        SpecError: shapes that do not fit each other, tokens that do not make two runs, a window below 1, a cap
            that is not positive, or there is no such axis.
    """
    axis = mesh_axis(_NAME, axis_name)
    check_scores(_NAME, window, softcap)
    q, k, v = (array(_NAME, key, value) for key, value in (("q", q), ("k", k), ("v", v)))
    check_heads(_NAME, q, k, v)
    if q.shape[1] % 2:
        fail(_NAME, "q", "of two runs of as many tokens", q.shape[1], shapes=f"q is {show_shape(q.shape)}")
    tokens = axis.size * q.shape[1]
    first = None if documents is None else first_keys(checked_documents(_NAME, documents, q.shape[0], tokens))
    first = first_in_window(first, window, tokens)
    return ring_of(q, k, v, None if first is None else runs_of(first, axis), Scoring(scale, softcap), axis)


def ring_of(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array | None, how: Scoring, axis: Axis) -> jax.Array:
    """Return `ring_attention` of queries that see no key before a place of their own.

    first: [B or 1, S / R] int32, of each query of this device the place in its sequence of the first key that it sees; None:
        the sequence's first one. how: the scale and the cap of scores. q, k, v and the result: as there.
    """
    given = [q, k, v] if first is None else [q, k, v, first]
    # All of the type that the results have, so that the gradients of what is the same on some devices are summed here.
    types = varying_of(given)
    q, k, v, *more = (vary_over(copy_to(a, axis), types) for a in given)
    call = _RingCall(axis, how, block_tokens(q.shape[0], q.shape[1] // 2, q.shape[2], backends.device_kind()))
    return _attended(call, q, k, v, more[0] if more else None)


@dataclass(frozen=True)
class _RingCall:
    axis: Axis
    how: Scoring
    block: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(call: _RingCall, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array | None) -> jax.Array:
    y, _ = ring_steps.forward(q, k, v, call.axis, call.block, first, call.how)
    return checkpoint_name(y, ATTENTION)


def _forward(
    call: _RingCall, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array | None
) -> tuple[jax.Array, _Saved]:
    y, lse = ring_steps.forward(q, k, v, call.axis, call.block, first, call.how)
    # A policy that keeps the one has to keep the other: nothing is then sent again.
    y, lse = checkpoint_name(y, ATTENTION), checkpoint_name(lse, ATTENTION)
    return y, (q, k, v, first, y, lse)


def _backward(call: _RingCall, saved: _Saved, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, first, y, lse = saved
    acc = wide(q.dtype)
    delta = jnp.sum(y.astype(acc) * dy.astype(acc), axis=-1)
    d = ring_steps.backward(q, k, v, lse, delta, dy, call.axis, call.block, first, call.how)
    return *(gradient_of(a, da) for a, da in zip((q, k, v), d, strict=True)), None


_attended.defvjp(_forward, _backward)

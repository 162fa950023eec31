"""Causal attention a block of queries at a time, with recompute: no [tokens, tokens] array outlives its block.

On GPUs the kernels of cuDNN do the same where they can.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.heads import check_scores
from tiled_jax import backends
from tiled_jax.core.arrays import array
from tiled_jax.core.own_tokens import auto_mesh
from tiled_jax.layers.attention_blocks import SCORE_BYTES
from tiled_jax.layers.documents import checked_documents, first_keys

_NAME = "causal_attention"
BACKENDS = ("auto", "blocks", "cudnn")
# Why a call is none for cuDNN, whatever its operands.
UNKNOWN = "It knows neither documents, masks, caps nor blocks of another length."
ATTENTION = "attention_output"  # the name of the result, for policies of `jax.checkpoint`
# Queries in a block: on a CPU the scores of longer blocks leave the cache (1.5 to 3 times the time at 256).
QUERY_BLOCK_TOKENS = 64
# A run of blocks is one loop and has one static number of keys. In a single run half of the products meet future keys,
# which the mask drops; in n runs 1 / (n + 1) do. Every run is compiled by itself, so their number is small, and
# larger only for contexts whose products take longer than the compiler.
MIN_RUNS, MAX_RUNS = 4, 8
RUN_TOKENS = 1024


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    documents: jax.Array | None = None,
    mask: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    block_tokens: int | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Softmax attention of every query over the keys up to its own position.

    softmax(scale q k^T) v, with grouped heads: query head i reads key head i // (heads / kv_heads). Scores exist
    for one block of queries at a time, in forward and (recomputed) in backward.

    Args:
        q: [batch, tokens, heads, d].
        k, v: [batch, tokens, kv_heads, d], dtype of q; kv_heads divides heads.
        documents: [batch or 1, tokens] integers: runs of tokens with one number, each a sequence by itself. None: all of a
            sequence are one.
        mask: [batch or 1, tokens] of booleans or integers: the keys that are seen, by others than the query in their place,
            which always sees them. None: all.
        window: keys that a query sees, its own included, >= 1; no others are multiplied. None: all before it.
        scale: of the scores; None is d**-0.5.
        softcap: c tanh(score / c) replaces a score; None: as it is.
        block_tokens: queries in a block, >= 1; None is QUERY_BLOCK_TOKENS, or fewer to stay within SCORE_BYTES.
        backend: "blocks", the loops described here, on any device; "cudnn", the kernels of
            `jax.nn.dot_product_attention(implementation="cudnn")`; "auto" is cuDNN where it can compute this call, which its
            shapes, their dtype and JAX's default device decide (`cudnn_refused`), and otherwise the blocks.
    Returns:
        [batch, tokens, heads, d], dtype of q, under the name ATTENTION.
    Numerics: scores, softmax and the sums over query blocks of dk and dv in float32; the probabilities are rounded to
        the dtype of q before their product with v.
    Memory: about 16 * batch * heads * block_tokens * tokens bytes, and a float32 copy of k and v. cuDNN: for backward y and
        4 * batch * heads * tokens bytes.
    Derivatives: of cuDNN's in reverse mode alone.
    Raises:
        SpecError: documents or a mask of another shape, a window below 1, a cap that is not positive, or another backend.
        TypeError: documents that are no integers.
        UnsupportedError: backend="cudnn" where it cannot run.
    Source: Rabe and Staats 2021, self-attention does not need O(n^2) memory; here without splitting the keys.
    """
    batch, tokens, heads, d = q.shape
    check_scores(_NAME, window, softcap)
    scores = _Scores(d**-0.5 if scale is None else scale, softcap, None if (window or tokens) >= tokens else window)
    known = documents is None and mask is None and softcap is None and block_tokens is None
    if _backend(q, k, v, scores, backend, None if known else UNKNOWN) == "cudnn":
        return checkpoint_name(_cudnn(even(q), even(k), even(v), scores)[:, :tokens], ATTENTION)
    kv_heads = k.shape[2]
    block = block_tokens or _block_tokens(batch, tokens, heads)
    seen = _Seen(
        None if documents is None else first_keys(checked_documents(_NAME, documents, batch, tokens)),
        None if mask is None else checked_mask(_NAME, mask, batch, tokens),
    )
    # The loops below add up dk and dv in the dtype these two have here, so they enter in float32.
    keys, values = (jnp.swapaxes(a, 1, 2).astype(_wide(a.dtype)) for a in (k, v))
    queries = jnp.moveaxis(q.reshape(batch, tokens, kv_heads, heads // kv_heads, d), 1, 2)
    # The ragged block comes first in token order, where it has the fewest keys.
    ragged, blocks = tokens % block, tokens // block
    y = []
    if ragged:
        y.append(_attend_blocks(scores, keys, values, queries, seen, 0, ragged, ragged))
    blocks_in_run = math.ceil(blocks / (_runs(tokens) if scores.window is None else 1))
    for done in range(0, blocks, max(blocks_in_run, 1)):
        count = min(blocks_in_run, blocks - done)
        start, stop = ragged + done * block, ragged + (done + count) * block
        y.append(_attend_blocks(scores, keys, values, queries, seen, start, stop, block))
    return checkpoint_name(jnp.moveaxis(jnp.concatenate(y, axis=2), 2, 1).reshape(q.shape), ATTENTION)


class _Scores(NamedTuple):
    """How scores are made of products, and how many keys a query sees at most. Static."""

    scale: float
    softcap: float | None
    window: int | None

    def of(self, products: jax.Array) -> jax.Array:
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


class _Seen(NamedTuple):
    """Which keys a query sees: first [batch or 1, tokens], its first one; mask [batch or 1, tokens], those of others."""

    first: jax.Array | None
    mask: jax.Array | None


def checked_mask(function: str, mask: Any, batch: int, tokens: int, name: str = "mask") -> jax.Array:
    """Return a mask [batch or 1, tokens] as booleans.

    Raises:
        SpecError: it has another shape. TypeError: it is no array of booleans or integers.
    """
    mask = array(function, name, mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        fail_type(function, name, "of booleans or integers", mask.dtype)
    if mask.shape not in ((batch, tokens), (1, tokens)):
        rule = f"of shape [{batch}, {tokens}] or [1, {tokens}]"
        fail(function, name, rule, show_shape(mask.shape))
    return mask.astype(jnp.bool_)


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None, known: bool, backend: str
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None:
    """Return cuDNN's causal attention where it computes this call, None where blocks do. Arguments as `causal_attention`.

    It takes an even number of tokens: see `even`. known: whether nothing but q, k, v and the scale decides what is computed.
    """
    scores = _Scores(q.shape[-1] ** -0.5 if scale is None else scale, None, None)
    chosen = _backend(q, k, v, scores, backend, None if known else UNKNOWN)
    return partial(_cudnn, scores=scores) if chosen == "cudnn" else None


def _backend(q: jax.Array, k: jax.Array, v: jax.Array, scores: _Scores, backend: str, reason: str | None) -> str:
    """Return "blocks" or "cudnn", and record which runs. reason: why the call is none for cuDNN, whatever its operands."""
    chosen = _chosen(q, k, v, scores, backend, reason)
    backends.record_run(_NAME, chosen)
    return chosen


def _chosen(q: jax.Array, k: jax.Array, v: jax.Array, scores: _Scores, backend: str, reason: str | None) -> str:
    if backend not in BACKENDS:
        fail(_NAME, "backend", "one of " + ", ".join(BACKENDS), repr(backend))
    if backend == "blocks" or (backend == "auto" and backends.device_kind() == "cpu"):
        return "blocks"
    if reason is None and jax.typeof(q).sharding.mesh.explicit_axes:
        reason = "It takes no operands that a mesh of axis type Explicit cuts: call it inside jax.shard_map."
    if reason is None:
        shapes = ((batch, tokens + tokens % 2, *heads) for batch, tokens, *heads in (a.shape for a in (q, k, v)))
        reason = cudnn_refused(*shapes, q.dtype, backends.device_kind(), scores)
    if reason is None:
        return "cudnn"
    if backend == "cudnn":
        raise UnsupportedError(
            error_text(_NAME, "backend", "'auto' or 'blocks' for this call", "'cudnn'", advice=reason)
        )
    return "blocks"


@cache
def cudnn_refused(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    dtype: jnp.dtype,
    device: str,
    scores: _Scores | None = None,
) -> str | None:
    """Return why cuDNN cannot attend with operands of these shapes, in JAX's words; None where it can."""
    if device != "gpu":
        return "cuDNN needs a GPU."

    def with_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        y, pull = jax.vjp(partial(_cudnn, scores=scores or _Scores(q.shape[-1] ** -0.5, None, None)), q, k, v)
        return pull(y)

    try:
        jax.eval_shape(with_gradients, *(jax.ShapeDtypeStruct(shape, dtype) for shape in (q, k, v)))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, scores: _Scores) -> jax.Array:
    window = None if scores.window is None else (scores.window - 1, 0)
    y = jax.nn.dot_product_attention(
        *map(_sequences_apart, (q, k, v)),
        scale=scores.scale,
        is_causal=True,
        local_window_size=window,
        implementation="cudnn",
    )
    return _sequences_apart(y)


def even(a: jax.Array) -> jax.Array:
    """Return a [batch, tokens, heads, d] with a token of zeros more where their number is odd, as cuDNN wants an even one.

    Causal attention of no other token sees it.
    """
    return jnp.pad(a, ((0, 0), (0, 1), (0, 0), (0, 0))) if a.shape[1] % 2 else a


def _sequences_apart(a: jax.Array) -> jax.Array:
    """Return a [batch, tokens, heads, d], and its gradient, with no dim cut by a mesh but the first, as cuDNN needs it."""
    mesh = auto_mesh(a)
    if mesh is None:
        return a
    return lax.with_sharding_constraint(a, NamedSharding(mesh, P(P.UNCONSTRAINED, None, None, None)))


def _block_tokens(batch: int, tokens: int, heads: int) -> int:
    """QUERY_BLOCK_TOKENS, or the largest power of two whose scores fit SCORE_BYTES; at least 8, at most the tokens."""
    fitting = max(8, SCORE_BYTES // (4 * batch * heads * max(tokens, 1)))
    return max(1, min(tokens, QUERY_BLOCK_TOKENS, 2 ** (fitting.bit_length() - 1)))


def _runs(tokens: int) -> int:
    return min(MAX_RUNS, max(MIN_RUNS, tokens // RUN_TOKENS))


def _attend_blocks(
    scores: _Scores,
    keys: jax.Array,
    values: jax.Array,
    queries: jax.Array,
    seen: _Seen,
    start: int,
    stop: int,
    block: int,
) -> jax.Array:
    """Return queries start .. stop, equal blocks in one rolled loop; arrays are [batch, kv_heads, tokens, ...]."""
    keys, values, queries = keys[:, :, :stop], values[:, :, :stop], queries[:, :, start:stop]
    first = None if seen.first is None else seen.first[:, start:stop]
    mask = None if seen.mask is None else seen.mask[:, :stop]
    count = queries.shape[2] // block
    attend = partial(_block_attention, scores)
    if count == 1:
        return attend(keys, values, mask, queries, first, jnp.int32(start))

    def cut(a: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(a.reshape(*a.shape[:dim], count, block, *a.shape[dim + 1 :]), dim, 0)

    starts = start + block * jnp.arange(count, dtype=jnp.int32)
    blocks = cut(queries, 2), None if first is None else cut(first, 1), starts
    y = lax.map(lambda each: attend(keys, values, mask, *each), blocks)
    return jnp.moveaxis(y, 0, 2).reshape(queries.shape)


@partial(jax.checkpoint, static_argnums=(0,))
def _block_attention(
    scores: _Scores,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    queries: jax.Array,
    first: jax.Array | None,
    start: jax.Array,
) -> jax.Array:
    """Return one block: queries [batch, kv_heads, block, group, d] at positions start .. over all the given keys.

    first: [batch or 1, block], the first key that each of them sees. mask: of the keys.
    """
    dtype, block = queries.dtype, queries.shape[2]
    position = start + jnp.arange(block, dtype=jnp.int32)
    key = jnp.arange(keys.shape[2], dtype=jnp.int32)
    if scores.window is not None and block + scores.window - 1 < len(key):
        # Only the keys that some query of the block sees.
        span = block + scores.window - 1
        lowest = jnp.maximum(start + block - span, 0)
        keys, values = (lax.dynamic_slice_in_dim(a, lowest, span, 2) for a in (keys, values))
        mask = None if mask is None else lax.dynamic_slice_in_dim(mask, lowest, span, 1)
        key = lowest + jnp.arange(span, dtype=jnp.int32)
    product = partial(jnp.einsum, preferred_element_type=_wide(dtype), precision=precision_of(dtype))
    found = scores.of(product("bnqgd,bnkd->bnqgk", queries, keys.astype(dtype)))
    visible = (position[:, None] >= key[None, :])[None]
    if scores.window is not None:
        visible = visible & (position[:, None] < key[None, :] + scores.window)[None]
    if first is not None:
        visible = visible & (key[None, None, :] >= first[:, :, None])
    if mask is not None:
        visible = visible & (mask[:, None, :] | (position[:, None] == key[None, :])[None])
    found = jnp.where(visible[:, None, :, None, :], found, -jnp.inf)
    probabilities = jax.nn.softmax(found, axis=-1).astype(dtype)
    return product("bnqgk,bnkd->bnqgd", probabilities, values.astype(dtype)).astype(dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of sums: float32, or float64 where everything is."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 products are IEEE float32 on every device; shorter types have one kind of product."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None

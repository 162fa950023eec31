"""Generation with a cache of keys and values: one compiled program for a prompt's shape, whatever its tokens are.

Letters: B sequences, P tokens of the prompts, G tokens to generate, L layers, n key heads of d features.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, fail_with, show_shape
from tiled_jax.core.arrays import array
from tiled_jax.core.products import wide
from tiled_jax.layers.attention import checked_mask, precision_of
from tiled_jax.models.layer import Attention, DecoderLayer
from tiled_jax.models.llama import LayerKinds, Llama
from tiled_jax.models.rope import turned_by

_NAME = "generate"


def generate(
    model: Llama,
    input_ids: jax.Array,
    max_new_tokens: int,
    *,
    attention_mask: jax.Array | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: jax.Array | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int = 0,
) -> jax.Array:
    """Return the prompts and what the model writes behind them, [B, P + G] int32.

    A prompt goes through the layers once; after that every step is one token of each sequence, over the keys and values of
    those before it. Steps end when all sequences have. The prompts' padding is moved to the front.

    Args:
        input_ids: [B, P] integers, P >= 1.
        max_new_tokens: G, >= 1, an integer of Python's or of NumPy's.
        attention_mask: [B or 1, P], 0 for padding, on either side; every prompt has a token. None: there is none.
        temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).
        top_p: of the likeliest tokens as many as together have this probability are drawn from; in (0, 1].
        key: a random key, with a temperature alone.
        eos_token_id: ends a sequence, which goes on with pad_token_id; several: each of them. None: none does.
        pad_token_id: stands in front of prompts that are shorter, and behind the end.
    Numerics: as the model's forward: without a temperature the tokens are the argmax of the logits of all tokens before them.
    Memory: 2 L B (P + G) n d elements of the compute dtype, also for layers with a window.
    Raises:
        SpecError: another shape, no token to generate, a temperature below 0 or a top_p outside of (0, 1], a key or a top_p
            without a temperature or the other way round. TypeError: no arrays of integers.
        UnsupportedError: positions scaled by longrope that go on from the original ones into those beyond, whose cached
            keys would have to be turned again.
    Source: the arguments are those of transformers' generate; top-p: Holtzman et al. 2020, arXiv 1904.09751.
    Example:
        tokens = generate(model, prompts, 32, attention_mask=mask, eos_token_id=2)
    """
    ids = array(_NAME, "input_ids", input_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        fail_type(_NAME, "input_ids", "of integers", ids.dtype)
    if ids.ndim != 2 or 0 in ids.shape:
        fail(_NAME, "input_ids", "of shape [batch, tokens], one token or more", show_shape(ids.shape))
    max_new_tokens = _count(max_new_tokens)
    _check_sampling(temperature, top_p, key)
    mask = jnp.ones(ids.shape, jnp.bool_)
    if attention_mask is not None:
        batch, tokens = ids.shape
        mask = jnp.broadcast_to(checked_mask(_NAME, attention_mask, batch, tokens, "attention_mask"), ids.shape)
    _check_positions(model, mask, max_new_tokens)
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
    how = _How(max_new_tokens, sampled=temperature > 0, nucleus=top_p < 1, ends=ends, pad=pad_token_id)
    graph, parameters = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    limits = jnp.asarray([temperature, top_p], jnp.float32)
    return _generated(graph, how, parameters, ids.astype(jnp.int32), mask, limits, key)


def _count(max_new_tokens: Any) -> int:
    """Return how many tokens are asked for: an integer of Python's, of NumPy's or of JAX's, no bool."""
    dtype = getattr(max_new_tokens, "dtype", None)
    boolean = isinstance(max_new_tokens, bool) or (dtype is not None and jnp.issubdtype(dtype, jnp.bool_))
    try:
        count = 0 if boolean else operator.index(max_new_tokens)
    except TypeError:
        count = 0
    if count < 1:
        fail(_NAME, "max_new_tokens", "an integer >= 1", max_new_tokens)
    return count


class _How(NamedTuple):
    """All that is static about a call."""

    new: int
    sampled: bool
    nucleus: bool
    ends: tuple[int, ...]
    pad: int


class _State(NamedTuple):
    """Between two steps: the number of the next, all tokens [B, P + G], keys and values [L, B, P + G, n, d], who has ended."""

    step: jax.Array
    tokens: jax.Array
    cache: tuple[jax.Array, jax.Array]
    ended: jax.Array
    key: jax.Array


@partial(jax.jit, static_argnums=(0, 1))
def _generated(
    graph: Any,
    how: _How,
    parameters: nnx.State,
    ids: jax.Array,
    mask: jax.Array,
    limits: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model: Llama = nnx.merge(graph, parameters)
    order = jnp.argsort(mask, axis=1, stable=True)  # padding first, the others in their order
    ids, mask = (jnp.take_along_axis(a, order, axis=1) for a in (ids, mask))
    ids = jnp.where(mask, ids, how.pad)
    prompt = ids.shape[1]
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    places = jnp.maximum(jnp.arange(prompt, dtype=jnp.int32) - (prompt - lengths)[:, None], 0)
    kinds = LayerKinds(model.config, places, model.dtype)
    visible = jnp.pad(mask, ((0, 0), (0, how.new)), constant_values=True)
    logits, cache = _prompt(model, kinds, ids, mask, how.new)

    def chosen(state: _State, logits: jax.Array) -> _State:
        key, own = jax.random.split(state.key)
        token = _next(how, logits, limits, own)
        token = jnp.where(state.ended, how.pad, token)
        tokens = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], prompt + state.step, 1)
        ended = state.ended | jnp.isin(token, jnp.asarray(how.ends, jnp.int32)) if how.ends else state.ended
        return state._replace(step=state.step + 1, tokens=tokens, ended=ended, key=key)

    def step(state: _State) -> _State:
        place = prompt + state.step - 1
        token = lax.dynamic_index_in_dim(state.tokens, place, 1, keepdims=False)
        logits, cache = _one(model, kinds, token, lengths + state.step - 1, place, visible, state.cache)
        return chosen(state._replace(cache=cache), logits)

    tokens = jnp.pad(ids, ((0, 0), (0, how.new)), constant_values=how.pad)
    ended = jnp.zeros(ids.shape[0], jnp.bool_)
    state = chosen(_State(jnp.int32(0), tokens, cache, ended, key), logits)
    return lax.while_loop(lambda s: (s.step < how.new) & ~jnp.all(s.ended), step, state).tokens


def _prompt(
    model: Llama, kinds: LayerKinds, ids: jax.Array, mask: jax.Array, new: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the logits of the last token [B, V] and the cache, with room for `new` tokens."""
    graph, parameters = nnx.split(model.layers)
    batch, prompt = ids.shape

    def layer(x: jax.Array, given: tuple[nnx.State, jax.Array | None]) -> Any:
        one: DecoderLayer = nnx.merge(graph, given[0])
        q, k, v = one.attention.heads(one.attention_norm(x), prompt)
        q, k = one.attention.turned(q, k, kinds.angles(given[1]))
        y = one.attention.attend(q, k, v, None, mask, given[1])
        room = ((0, 0), (0, new), (0, 0), (0, 0))
        return one.behind(x, one.attention.o(y.reshape(len(x), -1))), (jnp.pad(k, room), jnp.pad(v, room))

    x, cache = lax.scan(layer, model.embedded(ids.reshape(-1)), (parameters, kinds.of_layer))
    return _logits(model, x.reshape(batch, prompt, -1)[:, -1]), cache


def _one(
    model: Llama,
    kinds: LayerKinds,
    token: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    visible: jax.Array,
    cache: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the logits behind one more token [B] of each sequence, and the cache with it; place: where it stands there."""
    graph, parameters = nnx.split(model.layers)
    turns, windows = kinds.turns, model.config.windows(visible.shape[1])
    behind = place - jnp.arange(visible.shape[1], dtype=jnp.int32)
    seen = [visible & (behind >= 0) & (True if w is None else behind < w) for w in windows]

    def layer(x: jax.Array, given: Any) -> Any:
        state, kind, keys, values = given
        one: DecoderLayer = nnx.merge(graph, state)
        q, k, v = one.attention.heads(one.attention_norm(x), 1)
        q, k = one.attention.turned(q, k, turned_by(kinds.of(turns, kind), positions[:, None]))
        keys, values = (lax.dynamic_update_slice_in_dim(a, b, place, 1) for a, b in ((keys, k), (values, v)))
        y = _attended(one.attention, q, keys, values, kinds.of(seen, kind))
        return one.behind(x, one.attention.o(y)), (keys, values)

    x, cache = lax.scan(layer, model.embedded(token), (parameters, kinds.of_layer, *cache))
    return _logits(model, x), cache


def _attended(attention: Attention, q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """Return attention of one query of each sequence, q [B, 1, heads, d], over keys [B, T, n, d], of which it sees some."""
    config, dtype = attention.config, q.dtype
    scale = attention.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    options: dict[str, Any] = {"preferred_element_type": wide(dtype), "precision": precision_of(dtype)}
    grouped = q.reshape(q.shape[0], keys.shape[2], -1, attention.head_dim)
    scores = jnp.einsum("bngd,btnd->bngt", grouped, keys, **options) * scale
    if config.attention_softcap is not None:
        scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
    probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(dtype)
    y = jnp.einsum("bngt,btnd->bngd", probabilities, values, **options)
    return y.astype(dtype).reshape(q.shape[0], -1)


def _next(how: _How, logits: jax.Array, limits: jax.Array, key: jax.Array) -> jax.Array:
    """Return the next token of each sequence, [B] int32, of logits [B, V]."""
    if not how.sampled:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature, top_p = limits.astype(logits.dtype)
    logits = logits / temperature
    if how.nucleus:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1) - jax.nn.softmax(ranked, axis=-1)
        least = jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _logits(model: Llama, x: jax.Array) -> jax.Array:
    """Return [B, V] in the wide dtype, of the last layer's results [B, H]."""
    return model.logits(model.norm(x).astype(model.dtype)).astype(wide(model.dtype))


def _check_sampling(temperature: float, top_p: float, key: jax.Array | None) -> None:
    if not temperature >= 0:
        fail(_NAME, "temperature", ">= 0", temperature)
    if not 0 < top_p <= 1:
        fail(_NAME, "top_p", "in (0, 1]", top_p)
    if temperature > 0 and key is None:
        fail(_NAME, "key", "given with a temperature", None, advice="Pass jax.random.key(seed).")
    if temperature == 0 and (key is not None or top_p < 1):
        fail_with(_NAME, "a key and top_p have no meaning without a temperature", advice="Pass temperature=1.0.")


def _check_positions(model: Llama, mask: jax.Array, new: int) -> None:
    for kind in model.config.kinds:
        rope = kind.rope
        if rope is None or rope.kind != "longrope":
            continue
        known = not isinstance(mask, Tracer)
        prompt = int(jnp.max(jnp.sum(mask, axis=1))) if known else mask.shape[1]
        if prompt <= rope.original_positions < prompt + new:
            rule = f"at most {rope.original_positions - prompt} for prompts of {prompt} tokens"
            advice = "Beyond them longrope turns all keys by other angles."
            raise UnsupportedError(error_text(_NAME, "max_new_tokens", rule, new, advice=advice))

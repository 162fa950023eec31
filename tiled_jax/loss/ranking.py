"""The entries of the vocabulary with the largest logits of each token: of a part of it, of several parts, of several devices.

Letters: t tokens, k entries of each, v entries of a part. Logits are compared as they are stored: scale and softcap keep
their order, or turn it round. One after the other is found, by a reduction that makes no array [t, v]; a sort would make two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.core.loops import vary_over, varying, varying_of
from tiled_jax.core.products import wide
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.math import Part, Rules, Statistics


class Ranking(NamedTuple):
    """The k best entries of each token, the best one first, of equal ones the first entry.

    compared: [t, k], what `Statistics` compares of them. entries: [t, k], int32. Places for which a part has no entry: -inf,
    and V, behind every entry.
    """

    compared: jax.Array
    entries: jax.Array

    def merge(self, other: "Ranking") -> "Ranking":
        """Return as many of two parts together."""
        axes = varying_of([*self, *other])
        pairs = zip(self, other, strict=True)
        compared, entries = (jnp.concatenate([vary_over(one, axes) for one in pair], axis=1) for pair in pairs)
        return _first(compared, entries, self.entries.shape[1])

    def over_devices(self, axis: Any) -> "Ranking":
        """Return as many of the whole vocabulary, from those of every device's part: one sum."""
        devices, mine = lax.axis_size(axis), lax.axis_index(axis)

        def everywhere(a: jax.Array) -> jax.Array:
            a = vary_over(a, varying(mine))
            rows = vary_over(jnp.zeros((devices, *a.shape), a.dtype), varying(a))
            return lax.dynamic_update_index_in_dim(rows, a, vary_over(mine, varying(a)), 0)

        whole: Ranking = lax.psum(jax.tree.map(everywhere, self), axis)
        compared, entries = (jnp.concatenate([*a], axis=1) for a in whole)
        return _first(compared, entries, self.entries.shape[1])

    def outputs(self, rules: Rules, found: Statistics) -> dict[str, jax.Array]:
        """Return what it gives of every token, [t] and [t, k]. found: over the whole vocabulary, as this is."""
        z = loss_math.z_of(rules, self.compared) - loss_math.z_of(rules, found.top)[:, None]
        log_probs = lax.stop_gradient(z - jnp.log(found.total)[:, None])
        return {"prediction": self.entries[:, 0], "top_logprobs": log_probs, "top_indices": self.entries}


def empty_ranking(rules: Rules, tokens: int, dtype: Any) -> Ranking | None:
    """Return the ranking of no entries at all; None where none is asked for."""
    k = rules.ranked
    if not k:
        return None
    return Ranking(jnp.full((tokens, k), -jnp.inf, dtype), jnp.full((tokens, k), rules.vocab, jnp.int32))


def ranking_of(rules: Rules, logits: jax.Array, part: Part) -> Ranking | None:
    """Return the best of the logits [t, v] of a part; None where none is asked for."""
    if not rules.ranked:
        return None
    compared = lax.stop_gradient(loss_math.signed(rules, logits))
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)
    entry = (jnp.asarray(part.start, jnp.int32) + column)[None, :]
    axes = varying(compared) | varying(entry)
    compared, entry = vary_over(compared, axes), vary_over(entry, axes)
    real = column[None, :] < logits.shape[1] if part.entries is None else column[None, :] < part.entries
    real &= entry < rules.vocab
    nothing = jnp.asarray(-jnp.inf, compared.dtype), jnp.int32(rules.vocab)
    nothing = jax.tree.map(lambda a: vary_over(a, axes), nothing)

    def following(last: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, Any]:
        value, at = (a[:, None] for a in last)
        left = real & ((compared < value) | ((compared == value) & (entry > at)))
        candidates = jnp.where(left, compared, nothing[0]), jnp.where(left, entry, nothing[1])
        best = tuple(lax.reduce(candidates, nothing, _better, (1,)))
        return best, best

    tokens = logits.shape[0]
    before = jnp.full(tokens, jnp.inf, compared.dtype), jnp.full(tokens, -1, jnp.int32)
    _, (values, entries) = lax.scan(following, jax.tree.map(lambda a: vary_over(a, axes), before), length=rules.ranked)
    return Ranking(values.T.astype(wide(logits.dtype)), entries.T)


def _better(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the candidate (logit, entry) with the larger logit, of equal ones the one with the first entry."""
    take = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(take, a[0], b[0]), jnp.where(take, a[1], b[1])


def _first(compared: jax.Array, entries: jax.Array, k: int) -> Ranking:
    """Return the best k of all, of equal ones the first entries."""
    turned, entries = lax.sort((-compared, entries), dimension=1, num_keys=2)
    return Ranking(-turned[:, :k], entries[:, :k])

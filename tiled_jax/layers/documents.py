"""Documents packed into one sequence: what a query sees, where positions restart, and what the last token predicts.

shared_specs.layers.documents says what a document is. Arrays are of all tokens of a sequence, [B, S].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.layers.documents import check_documents
from tiled_jax.core.arrays import array


def begins(documents: jax.Array) -> jax.Array:
    """Return [B, S]: whether a token is the first of its document. documents: [B, S], a number for each token."""
    changed = documents[:, 1:] != documents[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)[:, : documents.shape[1]]


def first_keys(documents: jax.Array) -> jax.Array:
    """Return [B, S] int32: the place of the first token of every token's document, the first key that it sees.

    Example:
        >>> first_keys(jnp.asarray([[7, 7, 2, 2, 2, 7]])).tolist()
        [[0, 0, 2, 2, 2, 5]]
    """
    places = jnp.arange(documents.shape[1], dtype=jnp.int32)
    return lax.cummax(jnp.where(begins(documents), places, 0), axis=1)


def first_in_window(first: jax.Array | None, window: int | None, tokens: int) -> jax.Array | None:
    """Return [B or 1, S]: the place of the first key that every query sees, through a window too; None: that of the sequence.

    Args:
        first: without the window. window: keys that a query sees, its own included; None, or `tokens`, is all.

    Example:
        >>> first_in_window(jnp.asarray([[0, 0, 0, 3, 3]]), 2, 5).tolist()
        [[0, 0, 1, 3, 3]]
    """
    if window is None or window >= tokens:
        return first
    begin = jnp.arange(tokens, dtype=jnp.int32)[None] - (window - 1)
    return jnp.maximum(jnp.int32(0) if first is None else first, begin)


def documents_of_positions(positions: jax.Array) -> jax.Array:
    """Return [B, S] int32, 0, 1, ...: which document a token is in, from positions that restart.

    Example:
        >>> documents_of_positions(jnp.asarray([[0, 1, 2, 0, 1, 0]])).tolist()
        [[0, 0, 0, 1, 1, 2]]
    """
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    return jnp.pad(jnp.cumsum(jumps, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))[:, : positions.shape[1]]


def documents_of_restarts(positions: jax.Array) -> jax.Array:
    """Return [B, S] int32, 0, 1, ...: which document a token is in for the loss, whose labels do not look across a restart.

    Example:
        >>> documents_of_restarts(jnp.asarray([[0, 1, 7, 0, 0, 2], [5, 5, 5, 5, 5, 5]])).tolist()
        [[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0]]
    """
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = (after <= before) & jnp.any(after != before, axis=1, keepdims=True)
    return jnp.pad(jnp.cumsum(restarts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))[:, : positions.shape[1]]


def positions_in(documents: jax.Array) -> jax.Array:
    """Return [B, S] int32: the place of every token in its document."""
    return jnp.arange(documents.shape[1], dtype=jnp.int32) - first_keys(documents)


def shifted_labels(labels: jax.Array, documents: jax.Array | None = None, ignore_index: int = -100) -> jax.Array:
    """Return [B, S]: what every token is to predict, the next label, but nothing at the end of a document.

    documents: None where all of a sequence are one.
    """
    shifted = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=ignore_index)
    if documents is None:
        return shifted
    ends = jnp.pad(begins(documents)[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(ends, ignore_index, shifted)


def checked_documents(function: str, documents: Any, batch: int, tokens: int) -> jax.Array:
    """Return the documents of a call's tokens as an array.

    Raises:
        SpecError: they are not [B or 1, S]. TypeError: they are no array of integers.
    """
    documents = array(function, "documents", documents)
    integer = bool(jnp.issubdtype(documents.dtype, jnp.integer))
    check_documents(function, tuple(documents.shape), integer, str(documents.dtype), batch, tokens)
    return documents

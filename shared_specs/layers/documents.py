"""Documents packed into one sequence, in NumPy: what a query sees, where positions restart, and what the last token predicts.

A document is a run of tokens with one number. A query sees the keys of its own document up to itself, so that the place of its
document's first token says all; and the token in front of a seam predicts nothing.

Where positions are given instead of numbers, attention's documents are transformers': one begins wherever a position is not the
one before it plus one. The loss, in which transformers has no documents, counts every label that it can: a seam is where a
position is not larger than the one before it. Positions that go forward by more than one (strides, PoSE) take no label away,
nor does a row in which all are the same.
"""

from typing import Any

import numpy as np

from shared_specs.errors import fail, fail_type, show_shape

Array = np.ndarray[Any, Any]

NOTHING_LEFT = (
    "every label looks across a seam of documents, of which position_ids begin one wherever they do not grow. "
    "Pass position_ids that grow inside a document, or none."
)


def _places(like: Array) -> Array:
    return np.broadcast_to(np.arange(int(like.shape[1])), like.shape)


def begins(documents: Array) -> Array:
    """Return [B, S]: whether a token is the first of its document. documents: [B, S], a number for each token."""
    changed = documents[:, 1:] != documents[:, :-1]
    return np.concatenate((np.ones((len(documents), 1), bool), changed), 1)[:, : documents.shape[1]]


def first_keys(documents: Array) -> Array:
    """Return [B, S]: the place of the first token of every token's document, the first key that it sees.

    Example:
        >>> first_keys(np.array([[7, 7, 2, 2, 2, 7]])).tolist()
        [[0, 0, 2, 2, 2, 5]]
    """
    return np.maximum.accumulate(np.where(begins(documents), _places(documents), 0), 1)


def documents_of_positions(positions: Array) -> Array:
    """Return [B, S], 0, 1, ...: which document a token is in, from positions that restart.

    Example:
        >>> documents_of_positions(np.array([[0, 1, 2, 0, 1, 0]])).tolist()
        [[0, 0, 0, 1, 1, 2]]
    """
    jumps: Array = np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1
    return np.cumsum(jumps, 1)


def documents_of_restarts(positions: Array) -> Array:
    """Return [B, S], 0, 1, ...: which document a token is in for the loss, whose labels do not look across a restart.

    Example:
        >>> documents_of_restarts(np.array([[0, 1, 7, 0, 0, 2], [5, 5, 5, 5, 5, 5]])).tolist()
        [[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0]]
    """
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = (after <= before) & (after != before).any(1, keepdims=True)
    return np.concatenate((np.zeros((len(positions), 1), int), np.cumsum(restarts, 1)), 1)[:, : positions.shape[1]]


def positions_in(documents: Array) -> Array:
    """Return [B, S]: the place of every token in its document."""
    return _places(documents) - first_keys(documents)


def shifted_labels(labels: Array, documents: Array, ignore_index: int) -> Array:
    """Return what every token is to predict: the next label, but nothing at the end of a document."""
    shifted = np.concatenate((labels[:, 1:], np.full((len(labels), 1), ignore_index)), 1)
    ends = np.concatenate((begins(documents)[:, 1:], np.ones((len(documents), 1), bool)), 1)
    return np.where(ends, ignore_index, shifted)


def check_documents(function: str, shape: tuple[int, ...], integer: bool, dtype: str, batch: int, tokens: int) -> None:
    """Check what says which document a token is in.

    Args:
        shape, dtype: of the argument. integer: whether the dtype is one of integers.
        batch, tokens: sequences, and all tokens of one, not a rank's own alone.

    Raises:
        SpecError: it is not [B or 1, S]. TypeError: it has no integers.
    """
    if not integer:
        fail_type(function, "documents", "of integers", dtype)
    if shape not in ((batch, tokens), (1, tokens)):
        advice = "Every rank is given the numbers of all tokens, in the order of the sequence."
        fail(
            function,
            "documents",
            f"of shape {show_shape((batch, tokens))} or [1, {tokens}]",
            show_shape(shape),
            advice=advice,
        )

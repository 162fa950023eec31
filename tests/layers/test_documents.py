"""Documents packed into one sequence, in NumPy: what is seen, where positions restart, what is predicted at a seam."""

import numpy as np
import pytest

from shared_specs.errors import SpecError
from shared_specs.layers.documents import (
    check_documents,
    documents_of_positions,
    documents_of_restarts,
    first_keys,
    positions_in,
    shifted_labels,
)

DOCUMENTS = np.array([[5, 5, 5, 2, 2, 9, 9], [1, 1, 1, 1, 1, 1, 0]])


def test_from_numbers_to_positions_and_back() -> None:
    assert first_keys(DOCUMENTS).tolist() == [[0, 0, 0, 3, 3, 5, 5], [0, 0, 0, 0, 0, 0, 6]]
    positions = positions_in(DOCUMENTS)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 0]]
    found = documents_of_positions(positions)
    assert found.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1]]
    assert (positions_in(found) == positions).all()


def test_one_document_is_what_it_was() -> None:
    assert not documents_of_positions(np.arange(3, 9)[None]).any()
    assert (positions_in(np.zeros((2, 4), int)) == np.arange(4)).all()


def test_the_loss_has_a_seam_where_positions_do_not_grow() -> None:
    """Not where they go forward by more than one, as in PoSE, nor in a row of one position."""
    rows = {(0, 2, 4, 6): [0, 0, 0, 0], (0, 1, 50, 51): [0, 0, 0, 0], (0, 1, 0, 0): [0, 0, 1, 2]}
    rows |= {(3, 3, 3, 3): [0, 0, 0, 0], (3, 2, 1, 0): [0, 1, 2, 3], (0, 5, 5, 9): [0, 0, 1, 1]}
    for row, expected in rows.items():
        for dtype in (np.int64, np.uint8):
            assert documents_of_restarts(np.array([row], dtype)).tolist() == [expected]
    assert documents_of_restarts(np.array([list(row) for row in rows])).tolist() == list(rows.values())
    assert documents_of_restarts(np.zeros((2, 1), int)).tolist() == [[0], [0]]
    assert documents_of_restarts(np.zeros((2, 0), int)).shape == (2, 0)


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    labels = np.arange(14).reshape(2, 7)
    expected = [[1, 2, -1, 4, -1, 6, -1], [8, 9, 10, 11, 12, -1, -1]]
    assert shifted_labels(labels, DOCUMENTS, -1).tolist() == expected


def test_refused() -> None:
    check_documents("f", (1, 7), True, "int32", 2, 7)
    with pytest.raises(TypeError, match=r"^f: documents must be of integers, got float32"):
        check_documents("f", (1, 7), False, "float32", 2, 7)
    with pytest.raises(
        SpecError, match=r"^f: documents must be of shape \[2, 7\] or \[1, 7\], got \[2, 3\]\. Every rank"
    ):
        check_documents("f", (2, 3), True, "int32", 2, 7)

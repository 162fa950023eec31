"""Documents in PyTorch against the specification's NumPy."""

import numpy as np
import pytest
import torch

from shared_specs.layers import documents as spec
from tiled_torch.layers import documents as ours

RESTARTS = np.array([[0, 1, 50, 51, 0, 1, 1], [2, 2, 2, 2, 2, 2, 2], [0, 2, 4, 6, 8, 9, 0]])
NUMBERS = np.array([[5, 5, 5, 2, 2, 9, 9], [1, 1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize("name", ["begins", "first_keys", "positions_in"])
def test_equals_the_specification(name: str) -> None:
    found = getattr(ours, name)(torch.from_numpy(NUMBERS))
    assert found.tolist() == getattr(spec, name)(NUMBERS).tolist()


def test_from_positions() -> None:
    positions = spec.positions_in(NUMBERS)
    found = ours.documents_of_positions(torch.from_numpy(positions))
    assert found.tolist() == spec.documents_of_positions(positions).tolist()
    packed = ours.packed(torch.from_numpy(positions))
    assert packed is not None
    assert torch.equal(packed, found)
    assert ours.packed(torch.arange(3, 9)[None]) is None


@pytest.mark.parametrize("rows", [RESTARTS, RESTARTS[:, :1], RESTARTS[:, :0]], ids=["several", "a token", "none"])
def test_from_restarts(rows: np.ndarray) -> None:
    found = ours.documents_of_restarts(torch.from_numpy(rows))
    assert found.tolist() == spec.documents_of_restarts(rows).tolist()


def test_labels() -> None:
    labels = np.arange(14).reshape(2, 7)
    found = ours.shifted_labels(torch.from_numpy(labels), torch.from_numpy(NUMBERS), -1)
    assert found.tolist() == spec.shifted_labels(labels, NUMBERS, -1).tolist()
    assert ours.shifted_labels(torch.from_numpy(labels)).tolist() == [[*row[1:], -100] for row in labels.tolist()]


def test_parts_in_one_document() -> None:
    assert ours.fragments((0, 3, 4), 2, 9) == [(0, 2, 3), (3, 3, 4), (4, 4, 9)]
    assert ours.fragments((0,), 2, 5) == [(0, 2, 5)]
    assert ours.fragments((0, 5), 5, 5) == []

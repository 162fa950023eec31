"""Rank math by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_specs.errors import SpecError
from shared_specs.partitions import bounds, even_range, mlp_partition, range_of, vocab_range


@given(total=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_bounds_cover_and_differ_by_at_most_one(total: int, parts: int) -> None:
    edges = bounds(total, parts)
    sizes = [stop - start for start, stop in pairwise(edges)]
    assert (edges[0], edges[-1], len(sizes)) == (0, total, parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [range_of(total, parts, part) for part in range(parts)] == list(pairwise(edges))


def test_vocabulary_need_not_divide() -> None:
    assert [vocab_range(10, 3, rank) for rank in range(3)] == [(0, 4), (4, 7), (7, 10)]


def test_even_range_refuses_a_remainder() -> None:
    assert even_range("f", "heads", 12, 4, 3) == (9, 12)
    with pytest.raises(SpecError, match="f: heads must be a multiple of the 5 ranks it is split over, got 12"):
        even_range("f", "heads", 12, 5, 0)


def test_mlp_partition_names_what_is_left_to_reduce() -> None:
    alone = mlp_partition(12, 1, 0)
    assert (alone.columns, alone.y, alone.dx, alone.dw) == ((0, 12), "none", "none", "none")
    split = mlp_partition(12, 4, 1, sequence_ranks=2)
    assert split.columns == (3, 6)
    assert (split.y, split.dx, split.dw) == (
        "sum over tensor ranks",
        "sum over tensor ranks",
        "sum over sequence ranks",
    )

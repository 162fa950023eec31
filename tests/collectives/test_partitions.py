"""Rank math by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_specs.collectives.partitions import (
    VocabPartition,
    VocabUtility,
    bounds,
    even_range,
    range_of,
    vocab_partition,
    vocab_range,
)
from shared_specs.errors import SpecError


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


def assert_covers(parts: list[VocabPartition], local: list[int], vocab: int) -> None:
    """Every entry on exactly one rank, in rank order; padding only after the last entry."""
    entries = [entry for part in parts for entry in range(part.start, part.start + part.size)]
    assert entries == list(range(vocab))
    assert all(part.vocab == vocab and 0 <= part.size <= rows for part, rows in zip(parts, local, strict=True))
    padded = [part.size < rows for part, rows in zip(parts, local, strict=True)]
    first = padded.index(True) if any(padded) else len(parts)
    assert sum(part.size for part in parts[: first + 1]) == vocab
    assert all(part.size == 0 for part in parts[first + 1 :])


@given(vocab=st.integers(1, 3000), ranks=st.integers(1, 64))
def test_vocab_partition_follows_vocab_range(vocab: int, ranks: int) -> None:
    local = [stop - start for start, stop in (vocab_range(vocab, ranks, rank) for rank in range(ranks))]
    parts = [vocab_partition("f", vocab, rows, ranks, rank) for rank, rows in enumerate(local)]
    assert_covers(parts, local, vocab)
    assert [part.size for part in parts] == local


@given(vocab=st.integers(1, 3000), ranks=st.integers(1, 64), extra=st.integers(0, 40))
def test_vocab_partition_of_equal_padded_parts(vocab: int, ranks: int, extra: int) -> None:
    local = -(-vocab // ranks) + extra
    parts = [vocab_partition("f", vocab, local, ranks, rank) for rank in range(ranks)]
    assert_covers(parts, [local] * ranks, vocab)
    assert [part.start for part in parts] == [rank * local for rank in range(ranks)]


@given(local=st.integers(0, 300), ranks=st.integers(1, 64))
def test_vocab_partition_without_a_size(local: int, ranks: int) -> None:
    parts = [vocab_partition("f", None, local, ranks, rank) for rank in range(ranks)]
    assert_covers(parts, [local] * ranks, local * ranks)


@given(vocab=st.integers(1, 3000), ranks=st.integers(1, 64), missing=st.integers(1, 3000))
def test_vocab_partition_refuses_parts_that_do_not_hold_the_vocabulary(vocab: int, ranks: int, missing: int) -> None:
    local = max(0, vocab // ranks - missing)
    assert local * ranks < vocab
    for rank in range(ranks):
        if vocab_range(vocab, ranks, rank) == (vocab, vocab) and local == 0:
            continue  # this rank rightly holds nothing; those before it refuse
        with pytest.raises(
            SpecError, match=f"^f: the partition of the vocabulary must be >= .* of {vocab}, got {local}"
        ):
            vocab_partition("f", vocab, local, ranks, rank)


def test_vocab_partition_by_hand() -> None:
    assert [vocab_partition("f", 10, 3, 4, rank).size for rank in range(4)] == [3, 3, 3, 1]
    assert [vocab_partition("f", 5, 2, 4, rank).size for rank in range(4)] == [2, 2, 1, 0]
    with pytest.raises(SpecError) as caught:
        vocab_partition("f", 11, 4, 2, 0)
    assert str(caught.value) == (
        "f: the partition of the vocabulary must be >= 6 entries on rank 0 of 2 for a vocabulary of 11, got 4."
    )


def test_even_range_refuses_a_remainder() -> None:
    assert even_range("f", "heads", 12, 4, 3) == (9, 12)
    with pytest.raises(SpecError, match="f: heads must be a multiple of the 5 ranks it is split over, got 12"):
        even_range("f", "heads", 12, 5, 0)


def test_ranges_of_a_vocabulary_by_megatrons_names() -> None:
    ranges = [VocabUtility.vocab_range_from_global_vocab_size(12, rank, 4) for rank in range(4)]
    assert ranges == [vocab_range(12, 4, rank) for rank in range(4)]
    assert ranges == [VocabUtility.vocab_range_from_per_partition_vocab_size(3, rank, 4) for rank in range(4)]
    with pytest.raises(SpecError, match="global_vocab_size must be a multiple of the 4 ranks it is split over, got 13"):
        VocabUtility.vocab_range_from_global_vocab_size(13, 0, 4)

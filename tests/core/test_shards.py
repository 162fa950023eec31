"""Shard plans by properties: they cover, do not overlap, never pad, and their length is the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_specs.config import Tiling
from shared_specs.mlp.costs import MLPShape, plan_mlp
from shared_specs.shards import KERNEL_MULTIPLE, TARGET_TOKENS, ShardPlan, plan_tiling, plan_tokens

tokens_of = st.integers(0, 5000)


@given(tokens=tokens_of, num_shards=st.integers(1, 200))
def test_plan_by_count(tokens: int, num_shards: int) -> None:
    plan = plan_tokens(tokens, num_shards=num_shards)
    assert len(plan) == len(plan.spans) <= num_shards
    assert [token for start, stop in plan for token in range(start, stop)] == list(range(tokens))
    sizes = [stop - start for start, stop in plan]
    assert all(size == plan.shard_tokens for size in sizes[:-1])
    assert all(0 < size <= plan.longest for size in sizes)
    assert not tokens or plan.shard_tokens == -(-tokens // num_shards)


@given(tokens=tokens_of, shard_tokens=st.integers(1, 600))
def test_plan_by_length(tokens: int, shard_tokens: int) -> None:
    plan = plan_tokens(tokens, shard_tokens=shard_tokens)
    assert len(plan) == -(-tokens // shard_tokens)
    assert plan.longest == min(tokens, shard_tokens)


@given(tokens=tokens_of, num_shards=st.integers(1, 50), shard_tokens=st.integers(1, 600))
def test_plan_of_a_tiling(tokens: int, num_shards: int, shard_tokens: int) -> None:
    """What a tiling says is what every function that plans is told."""
    for said in ({"num_shards": num_shards}, {"shard_tokens": shard_tokens}, {}):
        tiling = Tiling(**said)
        assert tiling.cut() == {"num_shards": None, "shard_tokens": None, "memory_budget": None} | said
        assert plan_tiling(tokens, tiling, device="cpu") == plan_tokens(tokens, **said, device="cpu")
    assert Tiling(memory_budget=5).cut()["memory_budget"] == 5


@given(tokens=tokens_of, num_shards=st.integers(1, 50))
def test_kernels_get_whole_blocks(tokens: int, num_shards: int) -> None:
    plan = plan_tokens(tokens, num_shards=num_shards, multiple_of=KERNEL_MULTIPLE)
    assert plan.shard_tokens % KERNEL_MULTIPLE == 0
    assert all((stop - start) % KERNEL_MULTIPLE == 0 for start, stop in plan.spans[:-1])


@given(tokens=tokens_of, num_shards=st.integers(1, 50), keep=st.floats(0, 1))
def test_kept_shards_are_the_last(tokens: int, num_shards: int, keep: float) -> None:
    plan = plan_tokens(tokens, num_shards=num_shards)
    kept = [span for span in plan if span[0] >= plan.kept_start(keep)]
    assert len(kept) == plan.kept_shards(keep)
    assert abs(len(kept) - keep * len(plan)) <= 0.5
    assert list(plan)[len(plan) - len(kept) :] == kept
    # Where the first of them starts, and not somewhere in the shard before it.
    assert plan.kept_start(keep) == (kept[0][0] if kept else tokens)


@pytest.mark.parametrize(
    ("tokens", "num_shards", "sizes"),
    [(5, 4, [2, 2, 1]), (1, 4, [1]), (0, 4, []), (9, 4, [3, 3, 3]), (12, 8, [2] * 6), (33, 4, [9, 9, 9, 6])],
)
def test_by_hand(tokens: int, num_shards: int, sizes: list[int]) -> None:
    assert [stop - start for start, stop in plan_tokens(tokens, num_shards=num_shards)] == sizes


def test_automatic_plan_suits_the_device() -> None:
    assert TARGET_TOKENS == {"gpu": 8192, "cpu": 1024}
    assert plan_tokens(8192).shard_tokens == 1024
    assert len(plan_tokens(20000, device="gpu")) == 3
    assert plan_tokens(20000, device="gpu").shard_tokens == 6667


def test_automatic_plan_never_costs_more_than_no_tiling() -> None:
    """Wide 16-bit weights and few tokens: the float32 sums would outweigh what tiling saves."""
    small = MLPShape(tokens=1500, hidden=4096, intermediate=4096, itemsize=2, weight_itemsize=2)
    assert len(plan_mlp("test", small)) == 1
    assert len(plan_mlp("test", small, num_shards=2)) == 2  # asked for: done
    large = MLPShape(tokens=65536, hidden=4096, intermediate=4096, itemsize=2, weight_itemsize=2)
    assert len(plan_mlp("test", large)) == 64


def test_plan_refuses_nonsense() -> None:
    for tokens, shard_tokens in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="ShardPlan: tokens must be"):
            ShardPlan(tokens, shard_tokens)

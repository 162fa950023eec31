"""Plans, bytes and checks of tokens that are split over ranks, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.costs import eager_in_flight_bytes, gathered_plan, in_flight_bytes
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.errors import SpecError
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.sequence_costs import plan_sequence_loss, sequence_loss_peak_bytes
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp.sequence_costs import plan_sequence_mlp, sequence_peak_bytes
from shared_specs.shards import TARGET_TOKENS, ShardPlan

SHAPE = mlp_costs.MLPShape(tokens=4000, hidden=10, intermediate=30)
LOSS = loss_costs.LossShape(tokens=4000, hidden=10, vocab=301)


@given(
    tokens=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    num_shards=st.integers(1, 40),
    multiple_of=st.sampled_from([1, 8, 128]),
    keep=st.floats(0, 1),
)
def test_gathered_shards_hold_every_token_once(
    tokens: list[int], num_shards: int, multiple_of: int, keep: float
) -> None:
    """In rank order, with as many rows of every rank; the kept shards are the last ones, in whole."""
    plan = plan_sequence("f", tuple(tokens), num_shards=num_shards, multiple_of=multiple_of)
    ranks = len(tokens)
    assert len(plan) <= num_shards
    assert plan.padded == (len(set(tokens)) > 1)
    for rank, count in enumerate(tokens):
        spans = plan.local(rank)
        assert [token for start, stop in spans for token in range(start, stop)] == list(range(count))
        assert len(spans) == len(plan)
    for shard, (start, stop) in enumerate(plan.spans):
        assert stop - start == ranks * plan.rows(shard)
        assert plan.rows(shard) == max(plan.sizes(shard)) > 0
        assert plan.sizes(shard) == tuple(b - a for a, b in (plan.span(rank, shard) for rank in range(ranks)))
    assert plan.spans == gathered_plan(plan).spans
    assert all(ranks * plan.rows(shard) % multiple_of == 0 for shard in range(len(plan) - 1))
    kept = [span for span in plan.spans if span[0] >= plan.kept_start(keep)]
    assert len(kept) == plan.kept_shards(keep) == gathered_plan(plan).kept_shards(keep)
    assert plan.longest <= max((stop - start for start, stop in plan.spans), default=0)


def test_a_plan_by_hand() -> None:
    plan = plan_sequence("f", (5, 3, 0), num_shards=3)
    assert plan.shard_tokens == 2
    assert [plan.sizes(shard) for shard in range(3)] == [(2, 2, 0), (2, 1, 0), (1, 0, 0)]
    assert plan.spans == ((0, 6), (6, 12), (12, 15))
    assert (plan.kept_start(0.0), plan.kept_start(0.5), plan.kept_start(1.0)) == (15, 6, 0)
    assert plan_sequence("f", (0, 0), num_shards=3).spans == ()


def test_an_automatic_plan_aims_at_the_gathered_shard() -> None:
    for device, target in TARGET_TOKENS.items():
        plan = plan_sequence("f", (5 * target,) * 4, device=device)
        assert plan.longest == target
        assert len(plan) == 5 * 4


def test_in_flight_bytes_by_hand() -> None:
    plan = SequencePlan((1000,) * 4, 50)
    assert in_flight_bytes(SHAPE, plan) == (2 * 4 * 50 * 10 + 5 * 50 * 10) * 4
    assert in_flight_bytes(SHAPE, plan, upstream=7) == (2 * 4 * 50 * 17 + 5 * 50 * 10) * 4
    assert in_flight_bytes(SHAPE, SequencePlan((50,) * 4, 50)) == (4 * 50 * 10 + 5 * 50 * 10) * 4
    assert in_flight_bytes(SHAPE, SequencePlan((0,) * 4, 50)) == 0


def test_eager_in_flight_bytes_by_hand() -> None:
    """Two gathered shards at a time, x and dy together."""
    plan, one = SequencePlan((1000,) * 4, 50), SequencePlan((50,) * 4, 50)
    assert eager_in_flight_bytes(SHAPE, plan) == in_flight_bytes(SHAPE, plan)
    assert eager_in_flight_bytes(SHAPE, plan, upstream=7) == (2 * 4 * 50 * 10 + 5 * 50 * 10) * 4
    assert eager_in_flight_bytes(SHAPE, plan, upstream=12) == (4 * 50 * (10 + 12) + 5 * 50 * 10) * 4
    assert eager_in_flight_bytes(SHAPE, one) == in_flight_bytes(SHAPE, one)
    assert eager_in_flight_bytes(SHAPE, one, upstream=7) == (4 * 50 * (10 + 7) + 5 * 50 * 10) * 4
    assert eager_in_flight_bytes(SHAPE, SequencePlan((0,) * 4, 50)) == 0
    half = replace(SHAPE, itemsize=2)
    assert eager_in_flight_bytes(half, plan) == (2 * 4 * 50 * 10 + 8 * 50 * 10) * 2
    two = SequencePlan((1000,) * 2, 50)
    assert eager_in_flight_bytes(half, two) == in_flight_bytes(half, two)


def test_peaks_are_those_of_the_loop_and_what_is_under_way() -> None:
    plan = SequencePlan((1000,) * 4, 50)
    loop = ShardPlan(4000, 200)
    assert sequence_peak_bytes(SHAPE, plan) == mlp_costs.peak_bytes(SHAPE, loop) + eager_in_flight_bytes(
        SHAPE, plan, upstream=10
    )
    split = replace(LOSS, copied=True)
    rows_again = 200 * 301 * 4
    assert loss_costs.loss_peak_bytes(split, loop) == loss_costs.loss_peak_bytes(LOSS, loop) + rows_again
    assert sequence_loss_peak_bytes(split, plan) == loss_costs.loss_peak_bytes(split, loop) + eager_in_flight_bytes(
        split, plan
    )


@pytest.mark.parametrize("multiple_of", [1, 128])
def test_a_budget_takes_the_longest_shard_that_fits(multiple_of: int) -> None:
    tokens = (5000, 5000, 4000, 0)
    shape = mlp_costs.MLPShape(tokens=1, hidden=64, intermediate=128)
    for budget in (2**21, 2**23, 2**30):
        plan = plan_sequence_mlp("f", shape, tokens, memory_budget=budget, multiple_of=multiple_of)
        assert sequence_peak_bytes(shape, plan) <= budget
        longer = SequencePlan(tokens, plan.shard_tokens + max(1, multiple_of // 4))
        assert len(plan) == 1 or sequence_peak_bytes(shape, longer) > budget
    assert plan_sequence_mlp("f", shape, tokens, memory_budget=2**20, peak=lambda *_: 0).shard_tokens == 5000


def test_a_budget_for_the_loss() -> None:
    tokens, shape = (500, 300), loss_costs.LossShape(tokens=1, hidden=64, vocab=4096)
    plan = plan_sequence_loss("f", shape, tokens, memory_budget=2**22)
    longer = SequencePlan(tokens, plan.shard_tokens + 1)
    assert sequence_loss_peak_bytes(shape, plan) <= 2**22 < sequence_loss_peak_bytes(shape, longer)


CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    "whole": ({"sequence_parallel": False}, None),
    "equal": ({}, (8, 8)),
    "own": ({"split_sizes": [8, 3]}, (8, 3)),
    "traced": ({"split_sizes": [5, 3], "rank": None}, (5, 3)),
    "another's": ({"split_sizes": [7, 3]}, "f: split_sizes must be 8 for rank 0, the tokens of its x, got 7 in [7, 3]"),
    "too many": ({"split_sizes": [9, 3], "rank": None}, "f: split_sizes must be <= 8, the rows of x, got [9, 3] (x is"),
    "three": ({"split_sizes": [8, 8, 8]}, "f: split_sizes must be of one size for each of the 2 ranks, got [8, 8, 8]."),
    "alone": (
        {"split_sizes": [8, 8], "sequence_parallel": False},
        "f: split_sizes must be left out without sequence_parallel, got [8, 8]. It says how many tokens each rank holds.",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_tokens_of_every_rank(name: str) -> None:
    options, expected = CALLS[name]
    given: dict[str, Any] = {"sequence_parallel": True, "split_sizes": None, "rank": 0, **options}
    call: dict[str, Any] = {"tokens": 8, "ranks": 2, "rank": given.pop("rank"), "x": (2, 4, 6)}
    if isinstance(expected, str):
        with pytest.raises(SpecError) as caught:
            sequence_tokens("f", **given, **call)
        assert str(caught.value).startswith(expected)
    else:
        assert sequence_tokens("f", **given, **call) == expected


def test_sequence_parallel_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^f: sequence_parallel must be True or False, got int\.$"):
        sequence_tokens("f", 1, None, tokens=8, ranks=2, rank=0, x=(8, 6))

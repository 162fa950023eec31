"""Bytes of gathered tokens: what ranks that split a sequence hold of each other's beside one rank's loop.

Letters: R ranks, t the local tokens of a shard, so that a gathered shard is [R t, H].
"""

from collections.abc import Callable
from typing import Protocol

from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.core.budget import shard_tokens_within
from shared_specs.shards import ShardPlan


class Gathered(Protocol):
    """The shape of a call (`MLPShape`, `LossShape`) as these formulas read it: width of x, bytes of an element."""

    @property
    def hidden(self) -> int: ...

    @property
    def itemsize(self) -> int: ...


def in_flight_bytes(shape: Gathered, plan: SequencePlan, *, upstream: int = 0) -> int:
    """Return bytes of the gathered shards of a compiled program over a sequence that is split over R ranks, above one
    shard's loop.

    x [R t, H] of the shard that is computed and of the next, which is under way (`upstream`: as many rows of an upstream
    gradient of that width); partial sums [R t, H] of one shard, and the rank's own part of their sum, [t, H].
    """
    if not len(plan):
        return 0
    rows, shards = plan.rows(0), min(2, len(plan))
    return (shards * len(plan.tokens) * rows * (shape.hidden + upstream)) * shape.itemsize + _partial_sums(shape, plan)


def eager_in_flight_bytes(shape: Gathered, plan: SequencePlan, *, upstream: int = 0) -> int:
    """Return `in_flight_bytes` of the eager loop: two gathered shards at a time, of x or of x and upstream gradients.

    Where more than two ranks add up 16-bit partial sums in float32, they send each other as many of theirs.
    """
    if not len(plan):
        return 0
    second = max(shape.hidden, upstream) if len(plan) > 1 else upstream
    gathered = len(plan.tokens) * plan.rows(0) * (shape.hidden + second)
    return gathered * shape.itemsize + _partial_sums(shape, plan, exchanged=True)


def _partial_sums(shape: Gathered, plan: SequencePlan, *, exchanged: bool = False) -> int:
    ranks = len(plan.tokens)
    parts = ranks + (ranks if exchanged and shape.itemsize < 4 and ranks > 2 else 1)
    return parts * plan.rows(0) * shape.hidden * shape.itemsize


def gathered_plan(plan: SequencePlan) -> ShardPlan:
    """Return the loop that a rank makes over gathered shards, [R t, H] at a time, as a plan of its own."""
    ranks = len(plan.tokens)
    return ShardPlan(ranks * max(plan.tokens), ranks * plan.shard_tokens)


def sequence_within(
    function: str, budget: int, tokens: tuple[int, ...], peak: Callable[[SequencePlan], int], multiple_of: int = 1
) -> int:
    """Return the longest local shard whose peak fits the budget."""

    def of(local: ShardPlan) -> int:
        return peak(SequencePlan(tokens, local.shard_tokens))

    return shard_tokens_within(function, budget, max(tokens), of, multiple_of)

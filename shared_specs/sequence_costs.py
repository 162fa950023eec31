"""Bytes and plans of calls whose tokens are split over ranks: what `costs.py` says of one rank's loop, and what is gathered.

Letters as there; R ranks, t the local tokens of a shard, so that a gathered shard is [R t, H].
"""

from collections.abc import Callable
from functools import partial
from math import gcd

from shared_specs.costs import (
    LossShape,
    MLPShape,
    compiled_loss_peak_bytes,
    compiled_peak_bytes,
    loss_peak_bytes,
    peak_bytes,
    shard_tokens_within,
)
from shared_specs.partitions import SequencePlan, plan_sequence
from shared_specs.shards import ShardPlan


def in_flight_bytes(shape: MLPShape | LossShape, plan: SequencePlan, *, upstream: int = 0) -> int:
    """Bytes of the gathered shards of a compiled program over a sequence that is split over R ranks, above one shard's loop.

    x [R t, H] of the shard that is computed and of the next, which is under way (`upstream`: as many rows of an upstream
    gradient of that width); partial sums [R t, H] of one shard, and the rank's own part of their sum, [t, H].
    """
    if not len(plan):
        return 0
    rows, shards = plan.rows(0), min(2, len(plan))
    return (shards * len(plan.tokens) * rows * (shape.hidden + upstream)) * shape.itemsize + _partial_sums(shape, plan)


def eager_in_flight_bytes(shape: MLPShape | LossShape, plan: SequencePlan, *, upstream: int = 0) -> int:
    """As `in_flight_bytes`, of the eager loop: two gathered shards at a time, of x, or one of x and one of upstream gradients.

    Where more than two ranks add up 16-bit partial sums in float32, they send each other as many of theirs.
    """
    if not len(plan):
        return 0
    second = max(shape.hidden, upstream) if len(plan) > 1 else upstream
    gathered = len(plan.tokens) * plan.rows(0) * (shape.hidden + second)
    return gathered * shape.itemsize + _partial_sums(shape, plan, exchanged=True)


def _partial_sums(shape: MLPShape | LossShape, plan: SequencePlan, *, exchanged: bool = False) -> int:
    ranks = len(plan.tokens)
    parts = ranks + (ranks if exchanged and shape.itemsize < 4 and ranks > 2 else 1)
    return parts * plan.rows(0) * shape.hidden * shape.itemsize


def gathered_plan(plan: SequencePlan) -> ShardPlan:
    """The loop that a rank makes over gathered shards, [R t, H] at a time, as a plan of its own."""
    ranks = len(plan.tokens)
    return ShardPlan(ranks * max(plan.tokens), ranks * plan.shard_tokens)


def sequence_peak_bytes(shape: MLPShape, plan: SequencePlan, *, device: str = "cpu", kernels: bool = False) -> int:
    """Peak bytes of one eager backward of the sequence-parallel MLP, above what `peak_bytes` is above.

    shape: of this rank's part of the weights, I / R. That of its loop over gathered shards, and what is gathered: x and dy.
    """
    out = shape.hidden if shape.out is None else shape.out
    loop = peak_bytes(shape, gathered_plan(plan), device=device, kernels=kernels)
    return loop + eager_in_flight_bytes(shape, plan, upstream=out)


def plan_sequence_mlp(
    function: str,
    shape: MLPShape,
    tokens: tuple[int, ...],
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    kernels: bool = False,
    peak: Callable[[MLPShape, SequencePlan], int] | None = None,
    multiple_of: int = 1,
) -> SequencePlan:
    """The plan of one sequence-parallel MLP call: the same on every rank, since it follows from what all of them know.

    Args:
        tokens: local tokens of every rank. shape: of this rank's part of the weights; its tokens do not matter.
        num_shards, shard_tokens: of the local tokens. memory_budget: the longest t that fits is taken.
        peak: what a budget is compared with; None is `sequence_peak_bytes`.
    """
    if memory_budget is not None:
        eager = partial(sequence_peak_bytes, device=device, kernels=kernels)
        local = multiple_of // gcd(multiple_of, len(tokens))
        shard_tokens = _sequence_within(function, memory_budget, tokens, partial(peak or eager, shape), local)
    return plan_sequence(
        function, tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device, multiple_of=multiple_of
    )


def _sequence_within(
    function: str, budget: int, tokens: tuple[int, ...], peak: Callable[[SequencePlan], int], multiple_of: int = 1
) -> int:
    """The longest local shard whose peak fits the budget."""

    def of(local: ShardPlan) -> int:
        return peak(SequencePlan(tokens, local.shard_tokens))

    return shard_tokens_within(function, budget, max(tokens), of, multiple_of)


def sequence_loss_peak_bytes(
    shape: LossShape, plan: SequencePlan, *, device: str = "cpu", kernels: bool = False
) -> int:
    """Peak bytes of one eager loss whose tokens are split over ranks, above inputs, gradients and numbers per token."""
    loop = loss_peak_bytes(shape, gathered_plan(plan), device=device, kernels=kernels)
    return loop + eager_in_flight_bytes(shape, plan)


def plan_sequence_loss(
    function: str,
    shape: LossShape,
    tokens: tuple[int, ...],
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    kernels: bool = False,
    peak: Callable[[LossShape, SequencePlan], int] | None = None,
) -> SequencePlan:
    """The plan of one loss call whose tokens are split over ranks; as `plan_sequence_mlp`."""
    if memory_budget is not None:
        eager = partial(sequence_loss_peak_bytes, device=device, kernels=kernels)
        shard_tokens = _sequence_within(function, memory_budget, tokens, partial(peak or eager, shape))
    return plan_sequence(function, tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device)


def compiled_sequence_peak_bytes(shape: MLPShape, plan: SequencePlan, *, device: str = "cpu") -> int:
    """The most temporary bytes of the compiled (XLA) sequence-parallel MLP: an upper bound, as `compiled_peak_bytes`."""
    out = shape.hidden if shape.out is None else shape.out
    loop = compiled_peak_bytes(shape, gathered_plan(plan), device=device)
    return loop + in_flight_bytes(shape, plan, upstream=out)


def compiled_sequence_loss_peak_bytes(shape: LossShape, plan: SequencePlan, *, device: str = "cpu") -> int:
    """The most temporary bytes of the compiled (XLA) loss whose tokens are split over ranks: an upper bound."""
    loop = compiled_loss_peak_bytes(shape, gathered_plan(plan), device=device)
    return loop + in_flight_bytes(shape, plan)

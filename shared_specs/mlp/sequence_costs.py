"""Bytes and plans of MLP calls whose tokens are split over ranks: one rank's loop (costs.py), and what is gathered."""

from collections.abc import Callable
from functools import partial
from math import gcd

from shared_specs.collectives.costs import eager_in_flight_bytes, gathered_plan, in_flight_bytes, sequence_within
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.mlp.costs import MLPShape, compiled_peak_bytes, peak_bytes


def sequence_peak_bytes(shape: MLPShape, plan: SequencePlan, *, device: str = "cpu", kernels: bool = False) -> int:
    """Return peak bytes of one eager backward of the sequence-parallel MLP, above what `peak_bytes` is above.

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
    """Return the plan of one sequence-parallel MLP call: the same on every rank, since it follows from what all of them know.

    Args:
        tokens: local tokens of every rank. shape: of this rank's part of the weights; its tokens do not matter.
        num_shards, shard_tokens: of the local tokens. memory_budget: the longest t that fits is taken.
        peak: what a budget is compared with; None is `sequence_peak_bytes`.
    """
    if memory_budget is not None:
        eager = partial(sequence_peak_bytes, device=device, kernels=kernels)
        local = multiple_of // gcd(multiple_of, len(tokens))
        shard_tokens = sequence_within(function, memory_budget, tokens, partial(peak or eager, shape), local)
    return plan_sequence(
        function, tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device, multiple_of=multiple_of
    )


def compiled_sequence_peak_bytes(shape: MLPShape, plan: SequencePlan, *, device: str = "cpu") -> int:
    """Return the most temporary bytes of the compiled (XLA) sequence-parallel MLP: an upper bound, as `compiled_peak_bytes`."""
    out = shape.hidden if shape.out is None else shape.out
    loop = compiled_peak_bytes(shape, gathered_plan(plan), device=device)
    return loop + in_flight_bytes(shape, plan, upstream=out)

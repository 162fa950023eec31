"""Bytes and plans of losses whose tokens are split over ranks: one rank's loop (costs.py), and what is gathered."""

from collections.abc import Callable
from functools import partial

from shared_specs.collectives.costs import eager_in_flight_bytes, gathered_plan, in_flight_bytes, sequence_within
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.loss.costs import LossShape, compiled_loss_peak_bytes, loss_peak_bytes


def sequence_loss_peak_bytes(
    shape: LossShape, plan: SequencePlan, *, device: str = "cpu", kernels: bool = False
) -> int:
    """Return peak bytes of one eager loss whose tokens are split over ranks, above inputs, gradients and numbers per token."""
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
    """Return the plan of one loss call whose tokens are split over ranks; as `plan_sequence_mlp`."""
    if memory_budget is not None:
        eager = partial(sequence_loss_peak_bytes, device=device, kernels=kernels)
        shard_tokens = sequence_within(function, memory_budget, tokens, partial(peak or eager, shape))
    return plan_sequence(function, tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device)


def compiled_sequence_loss_peak_bytes(shape: LossShape, plan: SequencePlan, *, device: str = "cpu") -> int:
    """Return the most temporary bytes of the compiled (XLA) loss whose tokens are split over ranks: an upper bound."""
    loop = compiled_loss_peak_bytes(shape, gathered_plan(plan), device=device)
    return loop + in_flight_bytes(shape, plan)

"""Rows that are split over ranks, gathered and summed one shard at a time. No autograd here.

Letters: T tokens, R ranks, t local tokens of a shard. A gathered shard is [R t, ...]: every rank's local shard side by side,
a shorter one followed by rows of zeros (`partitions.SequencePlan`). Nothing of [T, H] is ever allocated.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared_specs.partitions import SequencePlan
from tiled_torch.parallel import transport
from tiled_torch.parallel.groups import RankGroup
from tiled_torch.parallel.transport import Pending


def gathered(
    over: RankGroup, plan: SequencePlan, parts: Sequence[Tensor], dtype: torch.dtype, last: int | None = None
) -> Iterator[tuple[int, list[Tensor]]]:
    """The number of a shard and the gathered shard of each of `parts`, of all shards, or of those before `last`.

    The next shard is under way while the caller computes, so two exist at a time; a caller that still held the one before
    when it asks for another would make them three.

    Args:
        parts: this rank's rows [T / R, ...] of each; cast to `dtype` shard by shard.
    """
    last = len(plan) if last is None else last
    pending = [_gather(over, plan, part, 0, dtype) for part in parts] if last else []
    for shard in range(last):
        following = [_gather(over, plan, part, shard + 1, dtype) for part in parts] if shard + 1 < last else []
        yield shard, _arrived(pending)
        pending = following


def gathered_once(over: RankGroup, plan: SequencePlan, part: Tensor, shard: int, dtype: torch.dtype) -> Tensor:
    """One gathered shard."""
    return _gather(over, plan, part, shard, dtype).wait()


def _arrived(pending: list[Pending]) -> list[Tensor]:
    """What the collectives bring; the list is left empty, so that only the caller holds it."""
    return [pending.pop(0).wait() for _ in range(len(pending))]


def _gather(over: RankGroup, plan: SequencePlan, part: Tensor, shard: int, dtype: torch.dtype) -> Pending:
    start, stop = plan.span(over.rank, shard)
    rows, mine = plan.rows(shard), part[start:stop].to(dtype)
    if stop - start < rows:
        padded = mine.new_zeros((rows, *part.shape[1:]))
        padded[: stop - start] = mine
        mine = padded
    return transport.all_gather(over, mine, 0)


class Scattered:
    """Partial sums of gathered shards, summed over the ranks; this rank's rows go to `out` [T / R, ...].

    One sum is under way at a time. Its shard's partial sums stay alive until it is waited for.
    """

    def __init__(self, over: RankGroup, plan: SequencePlan, out: Tensor) -> None:
        self.over, self.plan, self.out = over, plan, out
        self.pending: tuple[int, Pending] | None = None

    def start(self, shard: int, partial: Tensor) -> None:
        """Sends one shard's partial sums [R t, ...] on their way, once those before have arrived."""
        self.wait()
        self.pending = shard, transport.reduce_scatter(self.over, partial, 0)

    def wait(self) -> None:
        """Stores what is under way."""
        if self.pending is None:
            return
        (shard, pending), self.pending = self.pending, None
        start, stop = self.plan.span(self.over.rank, shard)
        self.out[start:stop] = pending.wait()[: stop - start]

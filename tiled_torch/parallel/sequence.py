"""Rows that are split over ranks, gathered and summed one shard at a time. No autograd here.

Letters: T tokens, R ranks, t local tokens of a shard. A gathered shard is [R t, ...]: every rank's local shard side by side,
a shorter one followed by rows of zeros (`partitions.SequencePlan`). Nothing of [T, H] is ever allocated.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from shared_specs.partitions import SequencePlan
from tiled_torch.parallel import transport
from tiled_torch.parallel.groups import RankGroup
from tiled_torch.parallel.transport import Pending


class Gathers:
    """Gathered shards in the order of their use. Two exist at a time: in use, or on their way while the caller computes.

    A caller that still held one when it has let go of it would make them three.

    Args:
        order: rows of this rank [T / R, ...] and the number of a shard of them, for every use; cast to `dtype`.
    """

    def __init__(
        self, over: RankGroup, plan: SequencePlan, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype
    ) -> None:
        self.over, self.plan, self.order, self.dtype = over, plan, iter(order), dtype
        self.under_way: deque[Pending] = deque()
        for _ in range(2):
            self.let_go()

    def take(self) -> Tensor:
        """The next one, [R t, ...], once it has arrived."""
        return self.under_way.popleft().wait()

    def let_go(self) -> None:
        """Says that one which was taken is no longer held, and sends the next on its way."""
        for part, shard in islice(self.order, 1):
            self.under_way.append(_gather(self.over, self.plan, part, shard, self.dtype))


def gathered(
    over: RankGroup, plan: SequencePlan, part: Tensor, dtype: torch.dtype, shards: range
) -> Iterator[tuple[int, Tensor]]:
    """The numbers of these shards with what is gathered of each, which the caller lets go of before it asks for the next."""
    gathers = Gathers(over, plan, ((part, shard) for shard in shards), dtype)
    for shard in shards:
        yield shard, gathers.take()
        gathers.let_go()


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

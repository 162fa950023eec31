"""Rows that are split over ranks, gathered and summed one shard at a time. No autograd here.

Letters: T tokens, R ranks, t local tokens of a shard. A gathered shard is [R t, ...]: every rank's local shard side by side,
a shorter one followed by rows of zeros (`partitions.SequencePlan`). Nothing of [T, H] is ever allocated.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from shared_specs.collectives.costs import gathered_plan
from shared_specs.collectives.sequence_plan import SequencePlan
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.collectives.transport import Pending
from tiled_torch.core.row_shards import Rows, Taken, Written


class Gathers(Taken):
    """Gathered shards in the order of their use. Two exist at a time: in use, or on their way while the caller computes.

    A caller must drop its reference to a shard before it takes the next one, or three exist at once.

    Args:
        order: rows of this rank [T / R, ...] and the number of a shard of them, for every use; cast to `dtype`.
        chosen: as in `GatheredRows`.
    """

    def __init__(
        self,
        over: RankGroup,
        plan: SequencePlan,
        order: Iterable[tuple[Tensor, int]],
        dtype: torch.dtype,
        chosen: Tensor | None = None,
    ) -> None:
        self.over, self.plan, self.order, self.dtype, self.chosen = over, plan, iter(order), dtype, chosen
        self.under_way: deque[Pending] = deque()
        for _ in range(2):
            self.let_go()

    def take(self) -> Tensor:
        """Return the next shard, [R t, ...], once it has arrived."""
        return self.under_way.popleft().wait()

    def let_go(self) -> None:
        """Start the next gather: the caller has dropped the shard that it took."""
        for part, shard in islice(self.order, 1):
            start, stop = self.plan.span(self.over.rank, shard)
            own = part[start:stop] if self.chosen is None else part.index_select(0, self.chosen[start:stop])
            self.under_way.append(_gather(self.over, self.plan.rows(shard), own.to(self.dtype)))


def _gather(over: RankGroup, rows: int, mine: Tensor) -> Pending:
    """Gather every rank's own rows, at most so many, the others of which are zeros."""
    if mine.shape[0] < rows:
        padded = mine.new_zeros((rows, *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        mine = padded
    return transport.all_gather(over, mine, 0)


class Scattered(Written):
    """Partial sums of gathered shards, summed over the ranks; this rank's rows go to `out` [T / R, ...].

    One sum is under way at a time. Its shard's partial sums stay alive until it is waited for. chosen: as in `GatheredRows`.
    """

    def __init__(
        self, over: RankGroup, plan: SequencePlan, out: Tensor, dtype: torch.dtype, chosen: Tensor | None = None
    ) -> None:
        self.over, self.plan, self.out, self.dtype, self.chosen = over, plan, out, dtype, chosen
        self.written: tuple[int, Tensor] | None = None
        self.pending: tuple[int, Pending] | None = None

    def start(self, shard: int) -> Tensor:
        """Return memory for one shard's partial sums [R t, ...], once those of the shard before have arrived."""
        self.finish()
        rows = self.over.size * self.plan.rows(shard)
        partial = self.out.new_empty((rows, *self.out.shape[1:]), dtype=self.dtype)
        self.written = shard, partial
        return partial

    def done(self) -> None:
        """Start the sum over the ranks of the shard that `start` gave memory for."""
        assert self.written is not None
        (shard, partial), self.written = self.written, None
        self.pending = shard, transport.reduce_scatter(self.over, partial, 0)

    def finish(self) -> None:
        """Wait for the sum that is under way and store this rank's rows."""
        if self.pending is None:
            return
        (shard, pending), self.pending = self.pending, None
        start, stop = self.plan.span(self.over.rank, shard)
        found = pending.wait()[: stop - start]
        if self.chosen is None:
            self.out[start:stop] = found
        else:
            self.out.index_copy_(0, self.chosen[start:stop], found)


class GatheredRows(Rows):
    """This rank's x [T / R, H] as gathered shards.

    chosen: the numbers of its own rows that there are, where not all are, of which `split` is then.
    """

    here = False

    def __init__(self, over: RankGroup, split: SequencePlan, x: Tensor, chosen: Tensor | None = None) -> None:
        super().__init__(x, gathered_plan(split))
        self.over, self.split, self.chosen = over, split, chosen

    def taken(self, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype) -> Taken:
        return Gathers(self.over, self.split, order, dtype, self.chosen)

    def written(self, out: Tensor, dtype: torch.dtype) -> Written:
        return Scattered(self.over, self.split, out, dtype, self.chosen)

    def room(self) -> Tensor:
        """Return zeros where there are rows that no shard writes."""
        return super().room() if self.chosen is None else torch.zeros_like(self.x)

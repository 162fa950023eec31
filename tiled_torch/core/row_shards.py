"""Rows of tokens in shards, as the loops of the MLP and of the loss read and write them: here, all on one device.

`collectives/gathered_tokens.py` has the same for tokens that are split over ranks, where reading a shard gathers it and
writing one scatters it.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shared_specs.shards import ShardPlan


class Taken:
    """Shards in the order of their use, cast to `dtype`. order: rows [T, ...] and the number of a shard of them."""

    def __init__(self, plan: ShardPlan, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype) -> None:
        self.spans, self.order, self.dtype = plan.spans, iter(order), dtype

    def take(self) -> Tensor:
        """Return the next shard, [t, ...]."""
        rows, shard = next(self.order)
        start, stop = self.spans[shard]
        return rows[start:stop].to(self.dtype)

    def let_go(self) -> None:
        """Tell that the caller has dropped the shard that it took."""


class Written:
    """`out` [T, ...], written one shard at a time: `start` returns where one goes, `done` ends it, `finish` ends them all."""

    def __init__(self, plan: ShardPlan, out: Tensor) -> None:
        self.spans, self.out = plan.spans, out

    def start(self, shard: int) -> Tensor:
        return self.out[slice(*self.spans[shard])]

    def done(self) -> None:
        pass

    def finish(self) -> None:
        pass


class Rows:
    """x [T, H] and the shards of tokens in which a loop goes through it."""

    here = (
        True  # every token; where it is False, x has this rank's tokens and a loop writes partial sums over the ranks
    )

    def __init__(self, x: Tensor, plan: ShardPlan) -> None:
        self.x, self.plan = x, plan

    def taken(self, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype) -> Taken:
        return Taken(self.plan, order, dtype)

    def written(self, out: Tensor, dtype: torch.dtype) -> Written:
        """dtype: of partial sums, if that is what shards write."""
        return Written(self.plan, out)

    def room(self) -> Tensor:
        """Return what `written` takes for x's gradient, [T, H]: shards write all of it."""
        return torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device)

    def shards(
        self, dtype: torch.dtype, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield the number, rows and x [t, H] of the shards from `first` to before `last`.

        The caller must drop its references to one shard before it takes the next.
        """
        spans = self.plan.spans[:last]
        taken = self.taken(((self.x, shard) for shard in range(first, len(spans))), dtype)
        for shard in range(first, len(spans)):
            yield shard, slice(*spans[shard]), taken.take()  # only the caller holds it
            taken.let_go()


class ChosenRows(Rows):
    """Some rows of x [T, H], by their numbers [n] in rising order, as if there were no others.

    A shard of x is a copy, and so is one of what is written until it goes to its rows.
    """

    def __init__(self, x: Tensor, chosen: Tensor, plan: ShardPlan) -> None:
        """plan: of n tokens."""
        super().__init__(x, plan)
        self.chosen = chosen

    def taken(self, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype) -> Taken:
        return _ChosenTaken(self, order, dtype)

    def written(self, out: Tensor, dtype: torch.dtype) -> Written:
        return _ChosenWritten(self, out)

    def room(self) -> Tensor:
        """Return zeros: there are rows that no shard writes."""
        return torch.zeros(self.x.shape, dtype=self.x.dtype, device=self.x.device)


class _ChosenTaken(Taken):
    def __init__(self, rows: ChosenRows, order: Iterable[tuple[Tensor, int]], dtype: torch.dtype) -> None:
        super().__init__(rows.plan, order, dtype)
        self.chosen = rows.chosen

    def take(self) -> Tensor:
        rows, shard = next(self.order)
        return rows.index_select(0, self.chosen[slice(*self.spans[shard])]).to(self.dtype)


class _ChosenWritten(Written):
    def __init__(self, rows: ChosenRows, out: Tensor) -> None:
        super().__init__(rows.plan, out)
        self.chosen = rows.chosen
        self.buffer = out.new_empty((rows.plan.longest, *out.shape[1:]))
        self.shard = 0

    def start(self, shard: int) -> Tensor:
        self.shard = shard
        start, stop = self.spans[shard]
        return self.buffer[: stop - start]

    def done(self) -> None:
        """Put the shard into its rows."""
        start, stop = self.spans[self.shard]
        self.out.index_copy_(0, self.chosen[start:stop], self.buffer[: stop - start])

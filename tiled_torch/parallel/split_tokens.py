"""The tokens of a loss that are split over ranks: x gathered and dx scattered shard by shard, numbers per token at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shared_specs.partitions import SequencePlan
from shared_specs.sequence_costs import gathered_plan
from tiled_torch.functional.loss_shards import Ranks, RowGradient, Rows
from tiled_torch.parallel import transport
from tiled_torch.parallel.groups import RankGroup
from tiled_torch.parallel.sequence import Gathers, Scattered


class SplitSequence:
    """`functional.loss_shards.SplitTokens` of one plan."""

    def __init__(self, over: RankGroup, plan: SequencePlan) -> None:
        self.over, self.plan = over, plan

    def rows(self, x: Tensor) -> Rows:
        return _GatheredRows(x, self.over, self.plan)

    def everywhere(self, values: list[Tensor], fill: float = 0) -> list[Tensor]:
        """One collective for all of them. They have one dtype."""
        most, shards, t = max(self.plan.tokens), len(self.plan), self.plan.shard_tokens
        mine = values[0].new_full((1, len(values), most), fill)
        for row, value in zip(mine[0], values, strict=True):
            row[: value.shape[0]] = value
        if not most:
            return list(values)
        found = transport.all_gather(self.over, mine, 0).wait()
        return [
            torch.cat([found[:, number, shard * t : (shard + 1) * t].reshape(-1) for shard in range(shards)])
            for number in range(len(values))
        ]

    def own(self, values: Tensor) -> Tensor:
        parts = [values[:0]]
        for shard, (start, _) in enumerate(self.plan.spans):
            first, last = self.plan.span(self.over.rank, shard)
            start += self.over.rank * self.plan.rows(shard)
            parts.append(values[start : start + last - first])
        return torch.cat(parts)


class _GatheredRows(Rows):
    def __init__(self, x: Tensor, over: RankGroup, split: SequencePlan) -> None:
        super().__init__(x, gathered_plan(split))
        self.over, self.split = over, split

    def shards(self, dtype: torch.dtype) -> Iterator[tuple[int, slice, Tensor]]:
        spans = self.split.spans
        gathers = Gathers(self.over, self.split, ((self.x, shard) for shard in range(len(spans))), dtype)
        for shard, span in enumerate(spans):
            yield shard, slice(*span), gathers.take()  # only the caller holds it
            gathers.let_go()

    def gradient(self, ranks: Ranks | None) -> RowGradient:
        return _ScatteredGradient(self)


class _ScatteredGradient(RowGradient):
    """dx of a gathered shard is a partial sum over the holders of the vocabulary, who are the holders of the tokens."""

    def __init__(self, rows: _GatheredRows) -> None:
        super().__init__(rows.x, None)
        self.sums = Scattered(rows.over, rows.split, self.dx)
        self.shard: tuple[int, Tensor] | None = None

    def start(self, shard: int, rows: slice) -> Tensor:
        self.sums.wait()  # while the logits of this shard were computed
        partial = self.dx.new_empty((rows.stop - rows.start, self.dx.shape[1]))
        self.shard = shard, partial
        return partial

    def done(self) -> None:
        assert self.shard is not None
        self.sums.start(*self.shard)
        self.shard = None

    def finish(self) -> Tensor:
        self.sums.wait()
        return self.dx

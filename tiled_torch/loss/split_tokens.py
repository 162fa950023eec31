"""The tokens of a loss that are split over ranks: x gathered and dx scattered shard by shard, numbers per token at once."""

import torch
from torch import Tensor

from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.loss.costs import LossShape, chosen_shard_tokens, runs_alone
from tiled_torch.collectives import transport
from tiled_torch.collectives.gathered_tokens import GatheredRows
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.core.row_shards import Rows


class SplitSequence:
    """`loops.SplitTokens` of one plan. chosen: the numbers of this rank's rows that there are; None: all."""

    def __init__(self, over: RankGroup, plan: SequencePlan, chosen: Tensor | None = None) -> None:
        self.over, self.plan, self.chosen = over, plan, chosen

    def rows(self, x: Tensor) -> Rows:
        return GatheredRows(self.over, self.plan, x, self.chosen)

    def everywhere(self, values: list[Tensor], fill: float = 0) -> list[Tensor]:
        """Gather the arrays, all of one dtype, in one collective."""
        if not max(self.plan.tokens):
            return list(values)
        found = self._of_ranks(values, fill)
        return [self._in_order(found[:, number]) for number in range(len(values))]

    def own(self, values: Tensor) -> Tensor:
        parts = [values[:0]]
        for shard, (start, _) in enumerate(self.plan.spans):
            first, last = self.plan.span(self.over.rank, shard)
            start += self.over.rank * self.plan.rows(shard)
            parts.append(values[start : start + last - first])
        return torch.cat(parts)

    def counted(self, targets: Tensor, ignore_index: int, shape: LossShape) -> tuple["SplitSequence", Tensor]:
        """Return the split that is run, of as many rows of every rank as the rank with most labels has, and its targets.

        All ranks know the labels of all, which are gathered anyway, so they come to the same plan without another collective.
        """
        most = max(self.plan.tokens)
        if not most:
            return self, targets
        found = self._of_ranks([targets], ignore_index)[:, 0]
        ignored = found == ignore_index
        counts = tuple((~ignored).sum(1).tolist())  # the one wait for the device
        if not runs_alone(most, max(counts)):
            return self, self._in_order(found)
        order = torch.argsort(ignored, dim=1, stable=True)[:, : max(counts)]
        t = chosen_shard_tokens(shape, self.plan.shard_tokens)
        chosen = order[self.over.rank, : counts[self.over.rank]]
        run = SplitSequence(self.over, SequencePlan(counts, t), chosen)
        return run, run._in_order(found.gather(1, order))

    def _of_ranks(self, values: list[Tensor], fill: float) -> Tensor:
        """Return [R, numbers, most], one row of every array of every rank, `fill` behind its last token."""
        mine = values[0].new_full((1, len(values), max(self.plan.tokens)), fill)
        for row, value in zip(mine[0], values, strict=True):
            row[: value.shape[0]] = value
        return transport.all_gather(self.over, mine, 0).wait()

    def _in_order(self, of_ranks: Tensor) -> Tensor:
        """Return [R, most] in the order of the gathered shards."""
        shards, t = len(self.plan), self.plan.shard_tokens
        parts = [of_ranks[:, shard * t : (shard + 1) * t].reshape(-1) for shard in range(shards)]
        return torch.cat([of_ranks.new_empty(0), *parts])

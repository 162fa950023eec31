"""The tokens of a loss that are split over ranks: x gathered and dx scattered shard by shard, numbers per token at once."""

import torch
from torch import Tensor

from shared_specs.collectives.sequence_plan import SequencePlan
from tiled_torch.collectives import transport
from tiled_torch.collectives.gathered_tokens import GatheredRows
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.core.row_shards import Rows


class SplitSequence:
    """`loops.SplitTokens` of one plan."""

    def __init__(self, over: RankGroup, plan: SequencePlan) -> None:
        self.over, self.plan = over, plan

    def rows(self, x: Tensor) -> Rows:
        return GatheredRows(self.over, self.plan, x)

    def everywhere(self, values: list[Tensor], fill: float = 0) -> list[Tensor]:
        """Gather the arrays, all of one dtype, in one collective."""
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

"""The shards of a layer's tokens, here or split over the ranks that split its weights, and what moves between these.

Letters: B batch, S sequence, R ranks of the tensor axis, t tokens of a shard of one rank's sequence.
A rank has its columns of q, k and v, and with them of attention, for all tokens; rows of the layer's input and result it has
all, or with sequence parallelism its own run of every sequence. Then a shard of the rows before and behind attention is every
rank's shard side by side, [R B, t, ...], so that one is gathered at a time; where a rank has fewer, it ends with zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.shards import ShardPlan
from tiled_torch.collectives import transport
from tiled_torch.collectives.conjugates import Join, Keep, Sum, SumSplit, move
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.tensors import is_dtensor


@dataclass(frozen=True)
class BlockRanks:
    """The ranks that split a layer's weights. mesh: of one dim. hooks: numbers of those of the styles that split them."""

    mesh: Any
    sequence_parallel: bool
    hooks: frozenset[int]


def is_split(name: str, parameter: Any, ranks: BlockRanks, linears: Sequence[str], last: Sequence[str]) -> bool:
    """Return whether a parameter is a DTensor as a layer wants it: rows of q, k, v, gate and up, columns of what follows them
    and everything else whole.

    linears: the layer's projections. last: those behind attention and in the MLP behind gate and up.
    """
    from torch.distributed.tensor import Replicate, Shard

    owner, _, kind = name.rpartition(".")
    wanted = Replicate() if owner not in linears else Shard(0)
    if owner in last:
        wanted = Shard(1) if kind == "weight" else Replicate()
    return is_dtensor(parameter) and parameter.device_mesh == ranks.mesh and parameter.placements == (wanted,)


class Shards:
    """All on this rank. spans: (start, stop) of every shard among the rows of the layer's input."""

    def __init__(self, plan: ShardPlan) -> None:
        self.spans = plan.spans

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def ranks(self) -> int:
        """Over which the weights are split."""
        return 1

    @property
    def split(self) -> bool:
        """Return whether the layer's parameters are DTensors, made so by styles whose hooks its modules have."""
        return False

    def rows(self, whole: Tensor, shard: int, dim: int) -> Tensor:
        """Return the rows of a shard, before or behind attention, of all tokens along `dim`."""
        start, stop = self.spans[shard]
        return whole.narrow(dim, start, stop - start)

    def put(self, whole: Tensor, part: Tensor, shard: int, dim: int) -> None:
        """Write them."""
        self.rows(whole, shard, dim).copy_(part)

    def enter(self, x: Tensor, shard: int) -> Tensor:
        """Return the operand of products with this rank's columns, of this rank's rows."""
        return x

    def leave(self, y: Tensor, shard: int, needed: bool = True) -> Tensor:
        """Return this rank's rows of the sum of what the ranks made from their rows of a weight. needed False: its gradient
        alone is."""
        return y

    def complete(self, sums: Iterable[tuple[str, GradientSum]]) -> None:
        """Add up over the ranks what each has of the gradients of parameters that all have, by name."""


class ColumnShards(Shards):
    """The weights are split over ranks, of which each has all tokens."""

    def __init__(self, plan: ShardPlan | SequencePlan, over: RankGroup) -> None:
        self.spans = plan.local(over.rank) if isinstance(plan, SequencePlan) else plan.spans
        self.over = over

    @property
    def ranks(self) -> int:
        return self.over.size

    @property
    def split(self) -> bool:
        return True

    def enter(self, x: Tensor, shard: int) -> Tensor:
        return move(x, self.over, Keep(), Sum())

    def leave(self, y: Tensor, shard: int, needed: bool = True) -> Tensor:
        return move(y, self.over, Sum(), Keep()) if needed else y

    def partial(self, name: str) -> bool:
        """Return whether a rank has only a part of this gradient: of norms of the heads, of which it has its own."""
        return name.startswith("self_attn.") and "_norm." in name

    def complete(self, sums: Iterable[tuple[str, GradientSum]]) -> None:
        """Sum over the ranks, in one collective, in the dtype of the sums."""
        found = [total for name, total in sums if self.partial(name)]
        if not found:
            return
        for total in found:
            total.finish()
        flat = torch.cat([total.acc.flatten() for total in found])
        whole = transport.all_reduce_(self.over, flat).wait()
        for total, part in zip(found, whole.split([total.acc.numel() for total in found]), strict=True):
            total.acc.copy_(part.view(total.acc.shape))
            total.empty = False


class TokenShards(ColumnShards):
    """The tokens between the split layers are split over the ranks too, in runs of every sequence."""

    def __init__(self, plan: SequencePlan, over: RankGroup) -> None:
        super().__init__(plan, over)
        self.plan = plan

    def _places(self, shard: int) -> list[tuple[int, int]]:
        """Return where each rank's rows of a shard begin in the whole sequence, and how many there are."""
        starts = (sum(self.plan.tokens[:rank]) for rank in range(self.over.size))
        spans = [self.plan.span(rank, shard) for rank in range(self.over.size)]
        return [(first + start, stop - start) for first, (start, stop) in zip(starts, spans, strict=True)]

    def rows(self, whole: Tensor, shard: int, dim: int) -> Tensor:
        longest, behind = self.plan.rows(shard), (0, 0) * (whole.dim() - dim - 1)
        parts = [whole.narrow(dim, start, count) for start, count in self._places(shard)]
        return torch.cat([pad(part, (*behind, 0, longest - part.shape[dim])) for part in parts])

    def put(self, whole: Tensor, part: Tensor, shard: int, dim: int) -> None:
        for (start, count), own in zip(self._places(shard), part.chunk(self.over.size), strict=True):
            whole.narrow(dim, start, count).copy_(own.narrow(dim, 0, count))

    def enter(self, x: Tensor, shard: int) -> Tensor:
        x = pad(x, (0, 0, 0, self.plan.rows(shard) - x.shape[1]))
        return move(x, self.over, Join(0), SumSplit(0))

    def leave(self, y: Tensor, shard: int, needed: bool = True) -> Tensor:
        start, stop = self.spans[shard]
        return move(y, self.over, SumSplit(0) if needed else _OwnShape(), Join(0))[:, : stop - start]

    def partial(self, name: str) -> bool:
        return True


def dealt(tokens: int, ranks: int) -> tuple[int, ...]:
    """Return how many tokens of a sequence every rank has of a DTensor: full runs first, then less."""
    run = -(-tokens // ranks)
    return tuple(max(0, min(tokens, (rank + 1) * run) - rank * run) for rank in range(ranks))


@dataclass(frozen=True)
class _OwnShape:
    """Return zeros in the shape of this rank's stretch. Nothing is sent."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape[0] // over.size, *x.shape[1:])

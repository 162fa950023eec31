"""Which rows every expert computes: the pairs of a token and an expert, in the order in which they are worked on.

Letters: T tokens, k experts of a token, E experts. Pair p is token p // k. Tokens are taken in groups, in a group one expert
after the other, of an expert at most so many rows at a time: an expert's weights are read, and its gradient is finished, once
for each group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tiled_torch.core.operands import has_values


class ExpertPart(NamedTuple):
    """Rows of one expert among those that are worked on at a time. pieces: how many of these its rows are in all.

    first, last: whether it is the first and the last of them.
    """

    expert: int
    rows: slice
    pieces: int = 1
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class ExpertRows:
    """Pairs of one expert in one group, `order[start:stop]`, in pieces of at most `rows`; or all those of several, one piece.

    counts: the pairs of the experts from `expert` on, of several at most `rows` together. sizes: the same on the device.
    """

    expert: int
    start: int
    counts: Sequence[int]
    rows: int
    sizes: Tensor

    @property
    def stop(self) -> int:
        return self.start + sum(self.counts)

    @property
    def experts(self) -> slice:
        return slice(self.expert, self.expert + len(self.counts))

    @property
    def pieces(self) -> list[slice]:
        return [slice(a, min(a + self.rows, self.stop)) for a in range(self.start, self.stop, self.rows)]

    def parts(self, piece: slice) -> list[ExpertPart]:
        """Return whose rows a piece holds, counted from its beginning."""
        if len(self.counts) == 1:
            whole = slice(0, piece.stop - piece.start)
            count = -(-self.counts[0] // self.rows)
            return [ExpertPart(self.expert, whole, count, piece.start == self.start, piece.stop == self.stop)]
        parts, start = [], 0
        for expert, count in enumerate(self.counts, self.expert):
            if count:
                parts.append(ExpertPart(expert, slice(start, start + count)))
            start += count
        return parts


class Routes:
    """The pairs of `index` [T, k], sorted. A number of E or above is nobody's: expert parallelism's mark for another rank's.

    group_tokens: of a group. rows: of one expert at a time, at most. several: take experts together that have no more rows.
    """

    def __init__(self, index: Tensor, experts: int, group_tokens: int, rows: int, *, several: bool = False) -> None:
        self.tokens, self.each = index.shape
        self.group_tokens, self.rows, self.experts, self.several = group_tokens, rows, experts, several
        self.groups = -(-self.tokens // group_tokens)
        keys = index.long().clamp(max=experts)
        if self.groups > 1:
            group = torch.arange(self.tokens, device=index.device).div_(group_tokens, rounding_mode="floor")
            keys = keys + group[:, None] * (experts + 1)
        keys = keys.reshape(-1)
        self.order = keys.argsort(stable=True)
        if has_values(index):  # the one look at them from the host
            counts = torch.bincount(keys, minlength=self.groups * (experts + 1))
            self.counts: list[int] = counts.tolist()
        else:
            self.counts = [count for group in range(self.groups) for count in self._even(group)]
            counts = index.new_empty(len(self.counts), dtype=torch.long)  # of a size alone, as all there
        self._sizes = counts.view(self.groups, experts + 1)

    def _even(self, group: int) -> list[int]:
        """Return what every expert has of a group in a simulation, whose tokens choose nothing: the same."""
        pairs = self.each * min(self.group_tokens, self.tokens - group * self.group_tokens)
        return [pairs * (e + 1) // self.experts - pairs * e // self.experts for e in range(self.experts)] + [0]

    def __iter__(self) -> Iterator[tuple[slice, list[ExpertRows]]]:
        """Yield the tokens of every group and its runs, those of experts with rows."""
        start = 0
        for group in range(self.groups):
            first = group * self.group_tokens
            runs: list[ExpertRows] = []
            sizes = self._sizes[group]
            counts = self.counts[group * (self.experts + 1) : (group + 1) * (self.experts + 1)]
            for expert, count in enumerate(counts):
                if count and expert < self.experts:
                    self._append(
                        runs, ExpertRows(expert, start, (count,), self.rows, sizes[expert : expert + 1]), sizes
                    )
                start += count
            yield slice(first, min(first + self.group_tokens, self.tokens)), runs

    def _append(self, runs: list[ExpertRows], run: ExpertRows, sizes: Tensor) -> None:
        """Add the rows of one expert, to those of the experts before it where they are taken together."""
        before = runs[-1] if runs else run
        if runs and self.several and run.stop - before.start <= self.rows:
            counts = (*before.counts, *(0,) * (run.expert - before.experts.stop), *run.counts)
            of_all = sizes[before.expert : before.expert + len(counts)]
            runs[-1] = ExpertRows(before.expert, before.start, counts, self.rows, of_all)
        else:
            runs.append(run)

"""Which rows every expert computes: the pairs of a token and an expert, in the order in which they are worked on.

Letters: T tokens, k experts of a token, E experts. Pair p is token p // k. Tokens are taken in groups, in a group one expert
after the other, of an expert at most so many rows at a time: an expert's weights are read, and its gradient is finished, once
for each group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tiled_torch.core.operands import has_values


@dataclass(frozen=True)
class ExpertRows:
    """The pairs of one expert in one group: `order[start:stop]`, in pieces of at most `rows`."""

    expert: int
    start: int
    stop: int
    rows: int

    @property
    def pieces(self) -> list[slice]:
        return [slice(a, min(a + self.rows, self.stop)) for a in range(self.start, self.stop, self.rows)]


class Routes:
    """The pairs of `index` [T, k], sorted. A number of E or above is nobody's: expert parallelism's mark for another rank's.

    group_tokens: of a group. rows: of one expert at a time, at most.
    """

    def __init__(self, index: Tensor, experts: int, group_tokens: int, rows: int) -> None:
        self.tokens, self.each = index.shape
        self.group_tokens, self.rows, self.experts = group_tokens, rows, experts
        self.groups = -(-self.tokens // group_tokens)
        keys = index.long().clamp(max=experts)
        if self.groups > 1:
            group = torch.arange(self.tokens, device=index.device).div_(group_tokens, rounding_mode="floor")
            keys = keys + group[:, None] * (experts + 1)
        keys = keys.reshape(-1)
        self.order = keys.argsort(stable=True)
        if has_values(index):  # the one look at them from the host
            self.counts: list[int] = torch.bincount(keys, minlength=self.groups * (experts + 1)).tolist()
        else:
            self.counts = [count for group in range(self.groups) for count in self._even(group)]

    def _even(self, group: int) -> list[int]:
        """Return what every expert has of a group in a simulation, whose tokens choose nothing: the same."""
        pairs = self.each * min(self.group_tokens, self.tokens - group * self.group_tokens)
        return [pairs * (e + 1) // self.experts - pairs * e // self.experts for e in range(self.experts)] + [0]

    def __iter__(self) -> Iterator[tuple[slice, list[ExpertRows]]]:
        """Yield the tokens of every group and its runs, those of experts with rows."""
        start = 0
        for group in range(self.groups):
            first = group * self.group_tokens
            runs = []
            counts = self.counts[group * (self.experts + 1) : (group + 1) * (self.experts + 1)]
            for expert, count in enumerate(counts):
                if count and expert < self.experts:
                    runs.append(ExpertRows(expert, start, start + count, self.rows))
                start += count
            yield slice(first, min(first + self.group_tokens, self.tokens)), runs

"""The plan of a sequence whose tokens are split over ranks."""

import math
from dataclasses import dataclass

from shared_specs.errors import fail
from shared_specs.shards import TARGET_TOKENS, plan_tokens


@dataclass(frozen=True)
class SequencePlan:
    """Shards of a sequence whose tokens are split over ranks: gathered shard i is every rank's local shard i side by side.

    Every rank's local tokens are cut at the same places, so a rank with fewer tokens ends with shorter or empty shards;
    the number of shards is the same everywhere, as it must be where each of them communicates. Parts of one gathered
    shard have equally many rows (`rows`): a shorter one is followed by padding, which stands for no token.

    Args:
        tokens: local tokens of every rank, in rank order.
        shard_tokens: local tokens of a full shard.
    """

    tokens: tuple[int, ...]
    shard_tokens: int

    def __len__(self) -> int:
        return -(-max(self.tokens, default=0) // self.shard_tokens)

    def local(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of every shard among the rank's own tokens."""
        return tuple(self.span(rank, shard) for shard in range(len(self)))

    def span(self, rank: int, shard: int) -> tuple[int, int]:
        """Return (start, stop) of one shard among the rank's own tokens."""
        last, t = self.tokens[rank], self.shard_tokens
        return min(shard * t, last), min((shard + 1) * t, last)

    def sizes(self, shard: int) -> tuple[int, ...]:
        """Return tokens that each rank gives to one gathered shard."""
        spans = (self.span(rank, shard) for rank in range(len(self.tokens)))
        return tuple(stop - start for start, stop in spans)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest gathered shard: R t."""
        return max((sum(self.sizes(shard)) for shard in range(len(self))), default=0)

    def rows(self, shard: int) -> int:
        """Return rows that every rank gives to one gathered shard: the most tokens any gives, the others' parts are padded."""
        return min(self.shard_tokens, max(self.tokens) - shard * self.shard_tokens)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every gathered shard where they lie end to end, padding included; the first is the longest."""
        ranks, t, most = len(self.tokens), self.shard_tokens, max(self.tokens, default=0)
        return tuple((ranks * i * t, ranks * min((i + 1) * t, most)) for i in range(len(self)))

    @property
    def padded(self) -> bool:
        """Return whether ranks hold different numbers of tokens, so that some gathered shard has padding."""
        return len(set(self.tokens)) > 1

    def kept_shards(self, keep: float) -> int:
        """Return how many shards, the last ones, keep their gate and up, as `ShardPlan.kept_shards`."""
        return int(keep * len(self) + 0.5)

    def kept_start(self, keep: float) -> int:
        """First row, in the order of `spans`, of the kept shards; the number of rows where none is kept."""
        spans = self.spans
        first = len(spans) - self.kept_shards(keep)
        return spans[first][0] if first < len(spans) else (spans[-1][1] if spans else 0)


def plan_sequence(
    function: str,
    tokens: tuple[int, ...],
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    device: str = "cpu",
    multiple_of: int = 1,
) -> SequencePlan:
    """Return the plan for ranks that hold `tokens` each: by count, by local length, or by what suits the device.

    Args:
        tokens: local tokens of every rank, in rank order.
        num_shards: at most this many shards, >= 1. shard_tokens: t itself, the local tokens of a full shard.
        device: an automatic plan aims at gathered shards of `shards.TARGET_TOKENS[device]`.
        multiple_of: gathered shards, R t, become multiples of it.
    """
    if not tokens or min(tokens) < 0:
        fail(function, "tokens", "one number >= 0 for each rank", tokens)
    ranks, most = len(tokens), max(tokens)
    if num_shards is None and shard_tokens is None:
        num_shards = -(-ranks * most // TARGET_TOKENS[device])
    t = plan_tokens(
        most,
        num_shards=num_shards,
        shard_tokens=shard_tokens,
        device=device,
        multiple_of=multiple_of // math.gcd(multiple_of, ranks),
    ).shard_tokens
    return SequencePlan(tuple(tokens), t)

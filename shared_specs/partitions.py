"""How a dim is split over ranks, and which gradient then needs which reduction. Integers only."""

import math
from dataclasses import dataclass
from hashlib import blake2b

from shared_specs.errors import fail
from shared_specs.shards import TARGET_TOKENS, plan_tokens


def bounds(total: int, parts: int) -> tuple[int, ...]:
    """parts + 1 boundaries of `total` items; part sizes differ by at most one, the longer parts first."""
    size, longer = divmod(total, parts)
    return tuple(part * size + min(part, longer) for part in range(parts + 1))


def range_of(total: int, parts: int, part: int) -> tuple[int, int]:
    """(start, stop) of one part under `bounds`."""
    edges = bounds(total, parts)
    return edges[part], edges[part + 1]


def even_range(function: str, dim: str, total: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of one rank where every rank must hold the same number; SpecError where `ranks` does not divide."""
    if total % ranks:
        fail(function, dim, f"a multiple of the {ranks} ranks it is split over", total)
    size = total // ranks
    return rank * size, (rank + 1) * size


def vocab_range(vocab: int, ranks: int, rank: int) -> tuple[int, int]:
    """Vocabulary entries of one rank; V need not be divisible, a rank may hold one entry less."""
    return range_of(vocab, ranks, rank)


class VocabUtility:
    """Equal parts of a vocabulary by Megatron-LM's names: (first, last) entries of a rank, the last one excluded.

    `vocab_range` is the rule for parts that differ by one entry.
    """

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Of ranks that hold `per_partition_vocab_size` entries each. world_size is not needed, and there for its place."""
        del world_size
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Of a vocabulary that the ranks share evenly; SpecError where they cannot."""
        return even_range(
            "vocab_range_from_global_vocab_size", "global_vocab_size", global_vocab_size, world_size, rank
        )


@dataclass(frozen=True)
class VocabPartition:
    """Entries [start, start + size) of `vocab`; a rank's rows beyond `size` are padding and stand for nothing."""

    start: int
    size: int
    vocab: int


def vocab_partition(function: str, vocab_size: int | None, local: int, ranks: int, rank: int) -> VocabPartition:
    """Which entries a rank's `local` rows hold, by `vocab_range` or, padded, `local` on every rank.

    vocab_size None: every rank holds `local`. SpecError where neither rule gives this rank so many.
    """
    if vocab_size is None:
        return VocabPartition(rank * local, local, ranks * local)
    start, stop = vocab_range(vocab_size, ranks, rank)
    if stop - start == local:
        return VocabPartition(start, local, vocab_size)
    if local * ranks < vocab_size:
        rule = f">= {stop - start} entries on rank {rank} of {ranks} for a vocabulary of {vocab_size}"
        fail(function, "the partition of the vocabulary", rule, local)
    return VocabPartition(rank * local, max(0, min(local, vocab_size - rank * local)), vocab_size)


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
        """(start, stop) of every shard among the rank's own tokens."""
        return tuple(self.span(rank, shard) for shard in range(len(self)))

    def span(self, rank: int, shard: int) -> tuple[int, int]:
        """(start, stop) of one shard among the rank's own tokens."""
        last, t = self.tokens[rank], self.shard_tokens
        return min(shard * t, last), min((shard + 1) * t, last)

    def sizes(self, shard: int) -> tuple[int, ...]:
        """Tokens that each rank gives to one gathered shard."""
        spans = (self.span(rank, shard) for rank in range(len(self.tokens)))
        return tuple(stop - start for start, stop in spans)

    @property
    def longest(self) -> int:
        """Tokens of the longest gathered shard: R t."""
        return max((sum(self.sizes(shard)) for shard in range(len(self))), default=0)

    def rows(self, shard: int) -> int:
        """Rows that every rank gives to one gathered shard: the most tokens any gives, the others' parts are padded."""
        return min(self.shard_tokens, max(self.tokens) - shard * self.shard_tokens)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every gathered shard where they lie end to end, padding included; the first is the longest."""
        ranks, t, most = len(self.tokens), self.shard_tokens, max(self.tokens, default=0)
        return tuple((ranks * i * t, ranks * min((i + 1) * t, most)) for i in range(len(self)))

    @property
    def padded(self) -> bool:
        """Whether ranks hold different numbers of tokens, so that some gathered shard has padding."""
        return len(set(self.tokens)) > 1

    def kept_shards(self, keep: float) -> int:
        """How many shards, the last ones, keep their gate and up, as `ShardPlan.kept_shards`."""
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
    """The plan for ranks that hold `tokens` each: by count, by local length, or by what suits the device.

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


@dataclass(frozen=True)
class ContextHeads:
    """Heads of one rank while it attends, where a group of ranks has cut the tokens of every sequence.

    Between the layers a rank holds the tokens of `even_range`, with all heads; in attention all tokens of `query` heads and
    of the `key` heads that those read. Ranks hold equal numbers of both, in rank order.

    Args:
        copies: how often every key head is repeated, copies side by side, before the heads are dealt out: 1 where the
            ranks divide the key heads.
    """

    query: int
    key: int
    copies: int


def context_heads(function: str, heads: int, kv_heads: int, ranks: int) -> ContextHeads:
    """How attention heads are dealt out; SpecError where `ranks` does not divide the query heads.

    kv_heads divides heads: query head i reads key head i // (heads / kv_heads). Both kv_heads and the ranks divide the
    number of repeated key heads, their least common multiple, which itself divides heads.
    """
    even_range(function, "the number of query heads", heads, ranks, 0)
    if kv_heads < 1 or heads % kv_heads:
        fail(function, "the number of key heads", f"a divisor of the {heads} query heads", kv_heads)
    repeated = math.lcm(kv_heads, ranks)
    return ContextHeads(heads // ranks, repeated // ranks, repeated // kv_heads)


# The axes across which each named stream of random numbers differs; it agrees across all others. "data" stands for
# data, context and pipeline ranks: what they compute is never the same activation.
RANDOM_STREAMS: dict[str, tuple[str, ...]] = {
    "data-parallel": ("data",),
    "tensor-parallel": ("data", "tensor"),
    "expert-parallel": ("data", "tensor", "expert"),
}


def stream_coordinates(stream: str, *, data: int = 0, tensor: int = 0, expert: int = 0) -> tuple[int, ...]:
    """What is folded into the one seed for a stream: its place among RANDOM_STREAMS, then the ranks it differs across."""
    ranks = {"data": data, "tensor": tensor, "expert": expert}
    return (list(RANDOM_STREAMS).index(stream), *(ranks[axis] for axis in RANDOM_STREAMS[stream]))


def derived_seed(seed: int, coordinates: tuple[int, ...]) -> int:
    """A seed in [0, 2^63) for the stream at `coordinates`, the same on every machine and in every version.

    Streams with different coordinates are as unrelated as a cryptographic hash makes them, also for neighbouring seeds:
    sums such as seed + rank would give rank 1 of one run the numbers of rank 0 of the next.
    """
    text = ",".join(str(number) for number in (seed, *coordinates))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

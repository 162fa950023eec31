"""How T tokens are cut into shards. Integers only; the plan made in forward is the plan used in backward."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared_specs.config import Tiling

# Tokens per shard that an automatic plan aims at. Reading and writing float32 weight gradients once per shard costs
# 200/t of the time on a GPU (2.4% at 8192); on a CPU a shard of 1024 keeps its activations near the cache.
TARGET_TOKENS = {"gpu": 8192, "cpu": 1024}
KERNEL_MULTIPLE = 128  # rows of a kernel's block: t is rounded up to it when a kernel backend runs


@dataclass(frozen=True)
class ShardPlan:
    """Spans of `shard_tokens` tokens in token order; the last one is the remainder, never padded, never empty.

    `len(plan)` is the truth: 5 tokens cut for 4 shards are 3 shards (2, 2, 1), and zero tokens are none.
    """

    tokens: int
    shard_tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.shard_tokens < 1:
            raise ValueError(f"ShardPlan: tokens must be >= 0 and shard_tokens >= 1, got {self}")

    def __len__(self) -> int:
        return -(-self.tokens // self.shard_tokens)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.spans)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every shard."""
        starts = range(0, self.tokens, self.shard_tokens)
        return tuple((start, min(start + self.shard_tokens, self.tokens)) for start in starts)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest shard; 0 without tokens."""
        return min(self.tokens, self.shard_tokens)

    def kept_shards(self, keep: float) -> int:
        """Return how many shards, the last ones, keep their gate and up: `keep * len(plan)` to the nearest, half up."""
        return int(keep * len(self) + 0.5)

    def kept_start(self, keep: float) -> int:
        """First token of the kept shards; `tokens` where none is kept."""
        return min(self.tokens, (len(self) - self.kept_shards(keep)) * self.shard_tokens)


def plan_tokens(
    tokens: int,
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    device: str = "cpu",
    multiple_of: int = 1,
) -> ShardPlan:
    """Return the plan for `tokens` tokens: by count, by length, or (neither given) by what suits the device.

    Args:
        tokens: T >= 0.
        num_shards: at most this many shards, >= 1: t = ceil(T / num_shards).
        shard_tokens: t itself, >= 1.
        device: "cpu" or "gpu"; sets the length an automatic plan aims at.
        multiple_of: t is rounded up to a multiple of this (kernels: KERNEL_MULTIPLE).
    """
    if shard_tokens is None:
        if num_shards is None:
            num_shards = -(-tokens // TARGET_TOKENS[device])
        shard_tokens = -(-tokens // max(1, num_shards))
    shard_tokens = max(1, shard_tokens)
    return ShardPlan(tokens, -(-shard_tokens // multiple_of) * multiple_of)


def plan_tiling(tokens: int, tiling: Tiling, *, device: str) -> ShardPlan:
    """Return the plan of a call whose bytes no formula knows; `tiling` is one without a memory_budget."""
    return plan_tokens(tokens, num_shards=tiling.num_shards, shard_tokens=tiling.shard_tokens, device=device)

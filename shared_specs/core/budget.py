"""The longest shard whose bytes fit a budget."""

from collections.abc import Callable

from shared_specs.errors import fail
from shared_specs.shards import ShardPlan


def shard_tokens_within(
    function: str, budget: int, tokens: int, peak: Callable[[ShardPlan], int], multiple_of: int = 1
) -> int:
    """Return the longest shard, in tokens, whose peak fits `budget` bytes; SpecError with the least budget where none does.

    A multiple of `multiple_of`, which may be more than there are tokens.
    """
    low, high = 1, -(-max(1, tokens) // multiple_of)

    def needed(blocks: int) -> int:
        return peak(ShardPlan(tokens, blocks * multiple_of))

    if needed(high) <= budget:
        return high * multiple_of
    if needed(low) > budget:
        least = "one token" if multiple_of == 1 else f"{multiple_of} tokens"
        fail(function, "memory_budget", f">= {needed(low)} bytes, {least} at a time", budget)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle)
    return low * multiple_of

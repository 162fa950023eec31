"""Attention heads over the ranks of a context."""

import math
from dataclasses import dataclass

from shared_specs.collectives.partitions import even_range
from shared_specs.errors import fail


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
    """Return how attention heads are dealt out; SpecError where `ranks` does not divide the query heads.

    kv_heads divides heads: query head i reads key head i // (heads / kv_heads). Both kv_heads and the ranks divide the
    number of repeated key heads, their least common multiple, which itself divides heads.
    """
    even_range(function, "the number of query heads", heads, ranks, 0)
    if kv_heads < 1 or heads % kv_heads:
        fail(function, "the number of key heads", f"a divisor of the {heads} query heads", kv_heads)
    repeated = math.lcm(kv_heads, ranks)
    return ContextHeads(heads // ranks, repeated // ranks, repeated // kv_heads)

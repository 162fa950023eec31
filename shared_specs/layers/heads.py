"""Attention heads over the ranks of a context."""

import math
from dataclasses import dataclass

from shared_specs.collectives.partitions import even_range
from shared_specs.errors import fail, show_shape


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


@dataclass(frozen=True)
class AttentionTurns:
    """Heads of a layer in the order in which they attend: groups one after the other, each in parts.

    Args:
        groups: of key heads with their query heads, side by side. parts: of the query heads of every key head of a group.
        keys: key heads of a group, of which each has been repeated `copies` times for ranks that would have none.
    """

    groups: int
    parts: int
    keys: int
    copies: int = 1

    @property
    def count(self) -> int:
        return self.groups * self.parts


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


TURNS = 4  # in which ranks that exchange tokens for heads attend, at least, where there are as many heads


def attention_turns(
    heads: int, kv_heads: int, ranks: int, *, one_group: bool = False, parts: bool = True
) -> AttentionTurns:
    """Return how many heads attend at a time in a layer that runs as one function.

    A key-value group after the other, each of as many heads as leave every rank a key head. Where these are few, and ranks
    exchange tokens for heads, also the query heads of every key head in parts.

    Args:
        one_group: all heads attend at once. parts: whether queries may attend in parts: not in a ring, whose keys would travel
            once for each.
    """
    groups = kv_heads // ranks if kv_heads % ranks == 0 and not one_group else 1
    dealt = context_heads("attention_turns", heads // groups, kv_heads // groups, ranks)
    keys, of_key = dealt.key * ranks, dealt.query // dealt.key
    divisors = (n for n in range(1, of_key + 1) if of_key % n == 0)
    several = ranks > 1 and parts and not one_group
    of_group = next(n for n in divisors if groups * n >= TURNS or n == of_key) if several else 1
    return AttentionTurns(groups, of_group, keys, dealt.copies)


def check_scores(function: str, window: int | None, softcap: float | None) -> None:
    """Check how many keys a query sees, and the cap of scores.

    Raises:
        SpecError: no key, or a cap that is not positive.
    """
    if window is not None and window < 1:
        fail(function, "window", ">= 1 or None", window)
    if softcap is not None and not softcap > 0:
        fail(function, "softcap", "> 0 or None", softcap)


def check_attention_shapes(
    function: str, layout: tuple[str, str, str, str], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> None:
    """Check that q, k and v are heads of the same tokens, query heads a multiple of key heads.

    Args:
        layout: names of the four dims: "B", "tokens", "heads" and "d", in the order that the function takes.

    Raises:
        SpecError: they are not.
    """
    given = {"q": q, "k": k, "v": v}
    for name, shape in given.items():
        if len(shape) != 4:
            fail(function, name, f"of shape [{', '.join(layout)}]", show_shape(shape))
    shapes = ", ".join(f"{name} is {show_shape(shape)}" for name, shape in given.items())
    batch, tokens, heads, width = map(layout.index, ("B", "tokens", "heads", "d"))
    if k[heads] != v[heads] or not k[heads] or q[heads] % k[heads]:
        rule = "heads whose number divides the query heads, as many for both"
        fail(function, "k, v", rule, f"{k[heads]} and {v[heads]}", shapes=shapes)
    if any(q[dim] != k[dim] or k[dim] != v[dim] for dim in (batch, tokens)) or q[width] != k[width]:
        fail(function, "q, k, v", "of the same sequences and tokens, q and k of the same d", "others", shapes=shapes)

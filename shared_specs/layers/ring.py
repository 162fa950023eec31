"""Rings: who holds which tokens, which scores each rank computes in each step, and how many bytes it sends.

Letters: R ranks of a ring, S tokens of a sequence, B sequences, d features of a head. A sequence is cut into 2 R runs of equal
length, of which rank r holds run r and run 2 R - 1 - r ("zigzag"): one of the first half, which sees few keys, and its mirror
image of the second, which sees many. Keys and values travel from rank r to rank r + 1, so that in step s a rank has those of
rank r - s. In every step every rank then computes the scores of two pairs of runs (in the first one two halves and one whole).

Source: Liu et al. 2023, ring attention, arXiv 2310.01889; the order of the runs: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shared_specs.errors import fail

Order = Literal["tokens", "zigzag"]
ORDERS = ("tokens", "zigzag")  # of `context_slice`: runs in token order, and those of rings
Run = tuple[int, int]


def check_order(function: str, order: object, *, pair: bool = False) -> None:
    """Check in which order the tokens of a sequence are dealt out. pair: over the ranks of a ring that share its places.

    Raises:
        SpecError: there is no such order, or places of a ring are shared without a ring.
    """
    if order not in ORDERS:
        fail(function, "order", "one of " + ", ".join(ORDERS), repr(order))
    if pair and order != "zigzag":
        fail(function, "order", "'zigzag' over a pair: a ring and the ranks inside", repr(order))


def ring_multiple(ring: int, inside: int = 1) -> int:
    """Return what divides the tokens of a sequence that a ring can share, whose places are shared by `inside` ranks each."""
    return ring * math.lcm(2, inside)


def held_runs(tokens: int, ring: int, rank: int, *, inside: int = 1, place: int = 0) -> tuple[Run, ...]:
    """Return (start, stop) of the runs that a rank holds, in token order; they may touch.

    Args:
        tokens: S, a multiple of `ring_multiple(ring, inside)`.
        ring: R. rank: in it.
        inside: ranks that share a place of the ring: its two runs, one behind the other, are cut into as many equal parts.
        place: of this rank among them.
    Example:
        >>> held_runs(16, 2, 0), held_runs(16, 2, 1)
        (((0, 4), (12, 16)), ((4, 8), (8, 12)))
        >>> held_runs(16, 2, 0, inside=2, place=1)
        ((12, 16),)
    """
    run, mirror = tokens // (2 * ring), 2 * ring - 1 - rank
    part = 2 * run // inside
    first, last = place * part, (place + 1) * part
    whole = ((rank * run, 0), (mirror * run, run))  # where a run begins in the sequence, and in what the place holds
    cut = ((start, max(first, at), min(last, at + run), at) for start, at in whole)
    return tuple((start + low - at, start + high - at) for start, low, high, at in cut if low < high)


@dataclass(frozen=True)
class RingStep:
    """The scores that a rank computes with the keys of one rank: of `queries` x `keys`, its own and the other's tokens.

    Args:
        owner: the rank whose keys these are.
        queries, keys: (start, stop) among the tokens that this rank and that `owner` hold.
        causal: queries and keys are the same tokens, and each sees those up to itself; otherwise every query sees every key.
    """

    owner: int
    queries: Run
    keys: Run
    causal: bool


def ring_steps(held: int, ring: int, rank: int) -> tuple[RingStep, ...]:
    """Return what a rank that holds `held` tokens (of two runs) computes, step by step; the first with its own keys.

    Of (query run, key run), a pair is whole where the queries' run comes later, empty where the keys' does, and causal where
    they are one. Of an earlier owner the first run is whole for both runs of queries, of a later one both are for the second.
    """
    half, whole = held // 2, (0, held)
    steps = [RingStep(rank, whole, whole, True)]
    for step in range(1, ring):
        owner = (rank - step) % ring
        earlier = owner < rank
        queries = whole if earlier else (half, held)
        steps.append(RingStep(owner, queries, (0, half) if earlier else whole, False))
    return tuple(steps)


def ring_bytes(
    *, ring: int, batch: int, held: int, kv_heads: int, features: int, itemsize: int, wide: int = 4, forwards: int = 1
) -> int:
    """Return the bytes that a rank sends in a forward and a backward of attention; as many arrive.

    Keys and values of every rank visit R - 1 others in each forward and in the backward, and there their gradients follow
    them, begun by the first of the others and in the dtype of sums; the last one sends them home.

    Args:
        held: tokens of a rank. features: of a key head and a value head together (2 d).
        itemsize: bytes of an element. wide: of a sum. forwards: 2 where attention is computed again for backward.
    """
    elements = batch * kv_heads * held * features
    return (ring - 1) * elements * ((forwards + 1) * itemsize + wide)


def exchange_bytes(
    *,
    ranks: int,
    batch: int,
    held: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    forwards: int = 1,
) -> int:
    """Return the bytes that a rank sends to exchange tokens for heads and back ("ulysses"), forward and backward.

    q, k, v there and attention's output back in each forward, as many gradients in backward; 1 / ranks of them stays.

    Args:
        held: tokens of a rank. kv_heads: after repetition (`ContextHeads.copies`). forwards: as of `ring_bytes`.
    """
    moved = batch * held * (2 * heads + 2 * kv_heads) * head_dim
    return moved * (ranks - 1) // ranks * itemsize * (forwards + 1)

"""Streams of random numbers over ranks: which ranks share one, and the seed of each."""

from hashlib import blake2b

# The axes across which each named stream of random numbers differs; it agrees across all others. "data" stands for
# data, context and pipeline ranks: what they compute is never the same activation.
RANDOM_STREAMS: dict[str, tuple[str, ...]] = {
    "data-parallel": ("data",),
    "tensor-parallel": ("data", "tensor"),
    "expert-parallel": ("data", "tensor", "expert"),
}


def stream_coordinates(stream: str, *, data: int = 0, tensor: int = 0, expert: int = 0) -> tuple[int, ...]:
    """Return the numbers that are folded into the one seed for a stream: its place among RANDOM_STREAMS, then the ranks it
    differs across.
    """
    ranks = {"data": data, "tensor": tensor, "expert": expert}
    return (list(RANDOM_STREAMS).index(stream), *(ranks[axis] for axis in RANDOM_STREAMS[stream]))


def derived_seed(seed: int, coordinates: tuple[int, ...]) -> int:
    """Return a seed in [0, 2^63) for the stream at `coordinates`, the same on every machine and in every version.

    Streams with different coordinates are as unrelated as a cryptographic hash makes them, also for neighbouring seeds:
    sums such as seed + rank would give rank 1 of one run the numbers of rank 0 of the next.
    """
    text = ",".join(str(number) for number in (seed, *coordinates))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

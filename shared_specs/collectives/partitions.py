"""Who has which part of a dim or of a vocabulary over ranks."""

from dataclasses import dataclass

from shared_specs.errors import fail


def bounds(total: int, parts: int) -> tuple[int, ...]:
    """parts + 1 boundaries of `total` items; part sizes differ by at most one, the longer parts first."""
    size, longer = divmod(total, parts)
    return tuple(part * size + min(part, longer) for part in range(parts + 1))


def range_of(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of one part under `bounds`."""
    edges = bounds(total, parts)
    return edges[part], edges[part + 1]


def even_range(function: str, dim: str, total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (start, stop) of one rank where every rank must hold the same number; SpecError where `ranks` does not divide."""
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
        """Return the range of a rank where each holds `per_partition_vocab_size` entries. world_size is not used."""
        del world_size
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of a vocabulary that the ranks share evenly; SpecError where they cannot."""
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
    """Return which entries a rank's `local` rows hold, by `vocab_range` or, padded, `local` on every rank.

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

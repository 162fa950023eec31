"""What ranks have to know of a call before anything is sent: how many tokens each holds, and that all make the same call."""

from collections.abc import Mapping, Sequence

from shared_specs.collectives.checks import check_split_sizes
from shared_specs.errors import fail, fail_type, show_shape

MANY = 8  # ranks that a message names one by one


def check_sequence_parallel(function: str, sequence_parallel: object) -> None:
    """Check that `sequence_parallel` is a flag.

    Raises:
        TypeError: it is neither True nor False.
    """
    if not isinstance(sequence_parallel, bool):
        fail_type(function, "sequence_parallel", "True or False", type(sequence_parallel).__name__)


def check_alike(function: str, said: Sequence[Mapping[str, str]]) -> None:
    """Check what every rank, in rank order, says of its call: SpecError for the first thing in which they differ."""
    for name in dict.fromkeys(name for of_rank in said for name in of_rank):
        words = [str(of_rank.get(name)) for of_rank in said]
        if len(set(words)) > 1:
            fail(function, name, f"the same on all {len(said)} ranks", _by_rank(words))


def _by_rank(words: Sequence[str]) -> str:
    """Return all of them in rank order; of more than MANY, each once with its ranks, the fewest first."""
    if len(words) <= MANY:
        return ", ".join(words)
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        ranks.setdefault(word, []).append(rank)
    order = sorted(ranks.items(), key=lambda item: len(item[1]))
    return ", ".join(f"{word} on {_of(numbers)}" for word, numbers in order)


def _of(ranks: Sequence[int]) -> str:
    if len(ranks) > MANY:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def sequence_tokens(
    function: str,
    sequence_parallel: object,
    split_sizes: object,
    *,
    tokens: int,
    ranks: int,
    rank: int | None,
    x: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the number of local tokens of every rank, in rank order; None without sequence parallelism.

    Args:
        split_sizes: of every rank, or None where all hold as many as this one.
        tokens: what this rank's x holds, all leading dims flattened. x: its shape, for messages.
        rank: of this one in the group; None where it is not known when the call is checked (a traced program, which is the
            same on all ranks): then every rank's x has as many rows, of which its size is the first ones.
    """
    check_sequence_parallel(function, sequence_parallel)
    if not sequence_parallel:
        if split_sizes is not None:
            advice = "It says how many tokens each rank holds."
            fail(function, "split_sizes", "left out without sequence_parallel", split_sizes, advice=advice)
        return None
    if split_sizes is None:
        return (tokens,) * ranks
    sizes = check_split_sizes(function, "split_sizes", split_sizes, ranks)
    shapes = f"x is {show_shape(x)}"
    if rank is None:
        if max(sizes) > tokens:
            fail(function, "split_sizes", f"<= {tokens}, the rows of x", list(sizes), shapes=shapes)
    elif sizes[rank] != tokens:
        rule = f"{tokens} for rank {rank}, the tokens of its x"
        fail(function, "split_sizes", rule, f"{sizes[rank]} in {list(sizes)}", shapes=shapes)
    return sizes

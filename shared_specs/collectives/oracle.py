"""What every rank gets from each collective of the parallel layers, forward and backward, and the cases that test it.

A collective maps a list with one array per rank to a list with one array per rank. Its backward takes each rank's gradient
of its own output to the gradient of its own input; the pairs are conjugate (copy/reduce, scatter/gather,
gather/reduce-scatter), so a backward is again one of the same few movements (Megatron-LM, arXiv 1909.08053 and 2205.05198).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shared_specs.collectives.partitions import bounds

Array = np.ndarray[Any, Any]


Parts = list[Array]


Sizes = Sequence[int] | None


def reduce(parts: Parts) -> Parts:
    """Return the sum, on every rank."""
    return [sum(parts[1:], parts[0]).copy() for _ in parts]


def gather(parts: Parts, dim: int) -> Parts:
    """Return all parts side by side along `dim`, on every rank."""
    return [np.concatenate(parts, axis=dim) for _ in parts]


def scatter(parts: Parts, dim: int, sizes: Sizes = None) -> Parts:
    """Return every rank's own stretch of its own array."""
    return [_cut(part, len(parts), dim, sizes)[rank] for rank, part in enumerate(parts)]


def reduce_scatter(parts: Parts, dim: int, sizes: Sizes = None) -> Parts:
    """Return every rank's own stretch of the sum."""
    return scatter(reduce(parts), dim, sizes)


def exchange(parts: Parts, sizes: Sequence[Sequence[int]]) -> Parts:
    """Rank r gives `sizes[r][s]` rows of dim 0, in order, to each rank s, which lays them side by side in rank order."""
    cut = [_cut(part, len(parts), 0, given) for part, given in zip(parts, sizes, strict=True)]
    return [np.concatenate([cut[source][rank] for source in range(len(parts))]) for rank in range(len(parts))]


def sequence_to_hidden(parts: Parts) -> Parts:
    """[T / R, ..., H] on every rank becomes [T, ..., H / R]: all tokens, this rank's features."""
    cut = [_cut(part, len(parts), -1, None) for part in parts]
    return [np.concatenate([cut[source][rank] for source in range(len(parts))]) for rank in range(len(parts))]


def hidden_to_sequence(parts: Parts) -> Parts:
    """[T, ..., H / R] on every rank becomes [T / R, ..., H]."""
    cut = [_cut(part, len(parts), 0, None) for part in parts]
    return [np.concatenate([cut[source][rank] for source in range(len(parts))], -1) for rank in range(len(parts))]


def _cut(whole: Array, ranks: int, dim: int, sizes: Sizes) -> Parts:
    if sizes is None:
        assert whole.shape[dim] % ranks == 0, "uneven without sizes"
        edges = bounds(whole.shape[dim], ranks)
    else:
        edges = (0, *np.cumsum(sizes).tolist())
    return np.split(whole, edges[1:-1], axis=dim)


_scatter_features, _gather_features = partial(scatter, dim=-1), partial(gather, dim=-1)


_reduce_scatter_features = partial(reduce_scatter, dim=-1)


def _scatter_tokens(x: Parts, dim: int = 0, split_sizes: Sizes = None) -> Parts:
    return scatter(x, dim, split_sizes)


def _reduce_scatter_tokens(x: Parts, dim: int = 0, split_sizes: Sizes = None) -> Parts:
    return reduce_scatter(x, dim, split_sizes)


def _gather_tokens(
    x: Parts, dim: int = 0, split_sizes: Sizes = None, tensor_parallel_output_grad: bool = True
) -> Parts:
    return gather(x, dim)


def _gather_tokens_backward(
    dy: Parts, dim: int = 0, split_sizes: Sizes = None, tensor_parallel_output_grad: bool = True
) -> Parts:
    return (reduce_scatter if tensor_parallel_output_grad else scatter)(dy, dim, split_sizes)


def _exchange_backward(dy: Parts, sizes: Sequence[Sequence[int]]) -> Parts:
    return exchange(dy, [list(column) for column in zip(*sizes, strict=True)])


@dataclass(frozen=True)
class Collective:
    """Both directions; keyword arguments are those of the public function (`sizes` of all_to_all: of every rank)."""

    forward: Callable[..., Parts]
    backward: Callable[..., Parts]


COLLECTIVES: dict[str, Collective] = {
    "copy_to_tensor_parallel_region": Collective(list, reduce),
    "reduce_from_tensor_parallel_region": Collective(reduce, list),
    "scatter_to_tensor_parallel_region": Collective(_scatter_features, _gather_features),
    "gather_from_tensor_parallel_region": Collective(_gather_features, _scatter_features),
    "scatter_to_sequence_parallel_region": Collective(_scatter_tokens, _gather_tokens),
    "gather_from_sequence_parallel_region": Collective(_gather_tokens, _gather_tokens_backward),
    "reduce_scatter_to_sequence_parallel_region": Collective(_reduce_scatter_tokens, _gather_tokens),
    "all_gather_last_dim_from_tensor_parallel_region": Collective(_gather_features, _reduce_scatter_features),
    "reduce_scatter_last_dim_to_tensor_parallel_region": Collective(_reduce_scatter_features, _gather_features),
    "all_to_all": Collective(exchange, _exchange_backward),
    "all_to_all_sequence_to_hidden": Collective(sequence_to_hidden, hidden_to_sequence),
    "all_to_all_hidden_to_sequence": Collective(hidden_to_sequence, sequence_to_hidden),
}

"""What every rank gets from each collective of the parallel layers, forward and backward, and the cases that test it.

A collective maps a list with one array per rank to a list with one array per rank. Its backward takes each rank's gradient
of its own output to the gradient of its own input; the pairs are conjugate (copy/reduce, scatter/gather,
gather/reduce-scatter), so a backward is again one of the same few movements (Megatron-LM, arXiv 1909.08053 and 2205.05198).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shared_specs.partitions import bounds

Array = np.ndarray[Any, Any]
Parts = list[Array]
Sizes = Sequence[int] | None


def reduce(parts: Parts) -> Parts:
    """Every rank gets the sum."""
    return [sum(parts[1:], parts[0]).copy() for _ in parts]


def gather(parts: Parts, dim: int) -> Parts:
    """Every rank gets all parts side by side along `dim`."""
    return [np.concatenate(parts, axis=dim) for _ in parts]


def scatter(parts: Parts, dim: int, sizes: Sizes = None) -> Parts:
    """Every rank keeps its own stretch of its own array."""
    return [_cut(part, len(parts), dim, sizes)[rank] for rank, part in enumerate(parts)]


def reduce_scatter(parts: Parts, dim: int, sizes: Sizes = None) -> Parts:
    """Every rank gets its own stretch of the sum."""
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


@dataclass(frozen=True)
class CollectiveCase:
    """One call: what every rank's x is shaped like and the arguments. `even`: all ranks see equal shapes."""

    id: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return len(self.shapes)

    @property
    def even(self) -> bool:
        outputs = {part.shape for part in self.outputs(self.inputs())}
        return len(set(self.shapes)) == 1 and len(outputs) == 1

    def inputs(self) -> Parts:
        """x of every rank, float64, different on each."""
        return [_draw(shape, rank) for rank, shape in enumerate(self.shapes)]

    def outputs(self, x: Parts) -> Parts:
        return COLLECTIVES[self.name].forward(x, **self.arguments)

    def output_gradients(self) -> Parts:
        """dy of every rank, different on each."""
        return [_draw(y.shape, 100 + rank) for rank, y in enumerate(self.outputs(self.inputs()))]

    def input_gradients(self, dy: Parts) -> Parts:
        return COLLECTIVES[self.name].backward(dy, **self.arguments)


def _draw(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


_LAST_DIM_WHOLE = (
    "scatter_to_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
)
_LAST_DIM_PARTS = (
    "copy_to_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "gather_from_tensor_parallel_region",
    "all_gather_last_dim_from_tensor_parallel_region",
)
_SEQUENCE_WHOLE = ("scatter_to_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region")


def collective_cases(ranks: int) -> list[CollectiveCase]:
    """Every collective over `ranks` ranks: even and uneven sizes, parts of no size, every dim."""
    cases = [_same(name, "last", ranks, (3, 2, 2 * ranks)) for name in _LAST_DIM_WHOLE]
    cases += [_same(name, "last", ranks, (3, 5)) for name in _LAST_DIM_PARTS]
    cases += [_same(name, "no tokens", ranks, (0, ranks)) for name in (*_LAST_DIM_WHOLE, *_LAST_DIM_PARTS)]
    for dim in (0, 1, -1):
        cases += _sequence_cases(ranks, f"dim {dim}", dim, None)
    cases += _sequence_cases(ranks, "longest first", 0, tuple(ranks - rank + 1 for rank in range(ranks)))
    cases += _sequence_cases(ranks, "uneven dim 1", 1, tuple(2 * rank + 1 for rank in range(ranks)))
    cases += _sequence_cases(ranks, "a rank without", 0, (0, *(rank + 1 for rank in range(ranks - 1))))
    cases += _sequence_cases(ranks, "all without", 0, (0,) * ranks)
    cases.append(_same("all_to_all", "even", ranks, (2 * ranks, 3), sizes=((2,) * ranks,) * ranks))
    uneven = tuple(tuple((source + 2 * target) % 3 for target in range(ranks)) for source in range(ranks))
    shapes = tuple((sum(row), 2, 3) for row in uneven)
    cases.append(CollectiveCase("all_to_all-uneven", "all_to_all", shapes, {"sizes": uneven}))
    cases.append(_same("all_to_all_sequence_to_hidden", "flat", ranks, (3, 2 * ranks)))
    cases.append(_same("all_to_all_sequence_to_hidden", "three dims", ranks, (2, 3, ranks)))
    cases.append(_same("all_to_all_hidden_to_sequence", "flat", ranks, (2 * ranks, 3)))
    cases.append(_same("all_to_all_hidden_to_sequence", "three dims", ranks, (ranks, 3, 2)))
    return cases


def _same(name: str, words: str, ranks: int, shape: tuple[int, ...], **arguments: Any) -> CollectiveCase:
    return CollectiveCase(f"{name}-{words}", name, (shape,) * ranks, arguments)


def _sequence_cases(ranks: int, words: str, dim: int, sizes: tuple[int, ...] | None) -> list[CollectiveCase]:
    """Scatter, reduce-scatter and both forms of gather along one dim of a [4, 3, 2]-like array."""
    every = sizes or (2,) * ranks
    given: dict[str, Any] = {"dim": dim, "split_sizes": sizes}
    cases = [_same(name, words, ranks, _sized(dim, sum(every)), **given) for name in _SEQUENCE_WHOLE]
    shapes = tuple(_sized(dim, size) for size in every)
    for summed in (True, False):
        ending = words if summed else f"{words}, gradient once"
        name = "gather_from_sequence_parallel_region"
        more = given | {"tensor_parallel_output_grad": summed}
        cases.append(CollectiveCase(f"{name}-{ending}", name, shapes, more))
    return cases


def _sized(dim: int, size: int) -> tuple[int, ...]:
    shape = [4, 3, 2]
    shape[dim] = size
    return tuple(shape)

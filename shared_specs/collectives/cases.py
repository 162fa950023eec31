"""Every collective's cases: what ranks hand over and what they must get back."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared_specs.collectives.oracle import COLLECTIVES, Array, Parts


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
        """Return x of every rank, float64, different on each."""
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
    """Return every collective over `ranks` ranks: even and uneven sizes, parts of no size, every dim."""
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

"""What the ranks run for the layers of inference: errors against one process, collectives, paths, refusals (tests/ranks.py)."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.on_torch.ranks_engines import Collectives
from tests.on_torch.ranks_loss import distance, draw, group_of
from tiled_torch import parallel
from tiled_torch.parallel import symmetric, transport
from tiled_torch.parallel.groups import RankGroup

HIDDEN, FEATURES, EPS = 8, 16, 1e-5


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(x: Tensor, weight: Tensor) -> Tensor:
    a = x.to(wide(x.dtype))
    return (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + EPS) * weight.to(a.dtype)).to(x.dtype)


def problem(ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two tokens a rank in each of three sequences; tokens are dim 0."""
    shapes = {
        "x": (2 * ranks, 3, HIDDEN),
        "weight": (FEATURES, HIDDEN),
        "bias": (FEATURES,),
        "norm_weight": (HIDDEN,),
        "residual": (2 * ranks, 3, FEATURES),
        "next_norm_weight": (FEATURES,),
    }
    return {name: draw(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}


def column_expected(a: dict[str, Tensor]) -> Tensor:
    return F.linear(norm(a["x"], a["norm_weight"]), a["weight"], a["bias"])


def row_expected(a: dict[str, Tensor], ranks: int) -> tuple[Tensor, Tensor]:
    """Partial results rounded and added in their dtype, as ranks make them; in float64 that is the truth."""
    total, *others = (F.linear(x, w) for x, w in zip(a["x"].chunk(ranks, -1), a["weight"].chunk(ranks, 1), strict=True))
    for other in others:
        total = total + other
    more = wide(total.dtype)
    h = (total.to(more) + a["residual"].to(more) + a["bias"].to(more)).to(total.dtype)
    return norm(h, a["next_norm_weight"]), h


def compared(found: Tensor, plain: Tensor, exact: Tensor) -> dict[str, float]:
    return {"ours": distance(found.double(), exact), "plain": distance(plain.double(), exact)}


def layers(
    rank: int,
    world: int,
    group: str = "default",
    dtype: str = "float64",
    bias: bool = True,
    gather: bool = True,
    sequence_parallel: bool = False,
    symmetric_memory: bool = False,
) -> dict[str, Any] | None:
    """Both functions. symmetric_memory: the wiring of that path, its three exchanges made by the backend's collectives."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    given = problem(ranks, getattr(torch, dtype))
    if not bias:
        given["bias"] = torch.zeros_like(given["bias"])
    exact = {name: a.double() for name, a in given.items()}
    tokens = lambda a: a.chunk(ranks)[rank]  # noqa: E731
    part = lambda a, dim: a.chunk(ranks, dim)[rank]  # noqa: E731
    with torch.no_grad(), Collectives() as column:
        y = parallel.norm_column_parallel_linear(
            tokens(given["x"]) if sequence_parallel else given["x"],
            given["norm_weight"],
            part(given["weight"], 0),
            part(given["bias"], 0) if bias else None,
            eps=EPS,
            sequence_parallel=sequence_parallel,
            group=over,
        )
    with torch.no_grad(), Collectives() as row, emulated(symmetric_memory) as path:
        normed, h = parallel.row_parallel_linear_residual_norm(
            part(given["x"], -1),
            part(given["weight"], 1),
            tokens(given["residual"]),
            given["next_norm_weight"],
            given["bias"] if bias else None,
            eps=EPS,
            gather=gather,
            path=path,
            group=over,
        )
    plain, truth = row_expected(given, ranks), row_expected(exact, ranks)
    own = (lambda a: a) if gather else tokens
    return {
        "errors": {
            "y": compared(y, part(column_expected(given), -1), part(column_expected(exact), -1)),
            "normed": compared(normed, own(plain[0]), own(truth[0])),
            "h": compared(h, tokens(plain[1]), tokens(truth[1])),
        },
        "collectives": [dict(counted.counts) for counted in (column, row)],
        "dtypes": {str(a.dtype) for a in (y, normed, h)} == {f"torch.{dtype}"},
    }


class emulated:
    """The name of the path to ask for; with symmetric memory its exchanges are stood in for."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __enter__(self) -> str:
        if not self.wanted:
            return "auto"

        def buffer(over: RankGroup, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.full((rows, features), torch.nan, dtype=dtype, device=device)

        def reduced(over: RankGroup, partial: Tensor) -> Tensor:
            return transport.reduce_scatter(over, partial, 0).wait()

        def gathered(over: RankGroup, mine: Tensor) -> Tensor:
            return transport.all_gather(over, mine, 0).wait()

        changes = {
            "why_not": lambda *_: None,
            "partial_buffer": buffer,
            "reduce_scatter_rows": reduced,
            "all_gather_rows": gathered,
        }
        self.patch = mock.patch.multiple(symmetric, **changes)
        self.patch.start()
        return "symmetric_memory"

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.patch.stop()


def paths(rank: int, world: int) -> list[Any]:
    """What inference_path says here, of the world and of one rank alone."""
    alone = [torch.distributed.new_group([one]) for one in range(world)][rank]
    return [list(parallel.inference_path("cpu")), list(parallel.inference_path("cpu", group=alone))]


def refused(rank: int, world: int) -> dict[str, str]:
    """Wrong call -> its error, on rank 0 alone: the other ranks make no call."""
    if rank:
        return {}
    a = problem(world, torch.float32)
    right = [
        a["x"].chunk(world, -1)[0],
        a["weight"].chunk(world, 1)[0],
        a["residual"].chunk(world)[0],
        a["next_norm_weight"],
    ]

    def row(place: int | None = None, value: Any = None, **more: Any) -> Callable[[], Any]:
        given = [value if place == index else one for index, one in enumerate(right)]
        return lambda: parallel.row_parallel_linear_residual_norm(*given, **more)

    def column(norm_weight: Tensor, weight: Tensor, **more: Any) -> Callable[[], Any]:
        return lambda: parallel.norm_column_parallel_linear(a["x"], norm_weight, weight, **more)

    wrong = {
        "path": row(path="fast"),
        "symmetric memory": row(path="symmetric_memory"),
        "residual": row(2, a["residual"]),
        "dtype of residual": row(2, right[2].double()),
        "norm_weight": row(3, torch.ones(3)),
        "tokens": row(0, right[0][:-1]),
        "eps": row(eps=-1.0),
        "gather": row(gather=1),
        "weight": row(1, torch.ones(FEATURES, 3)),
        "gradient": row(1, right[1].clone().requires_grad_()),
        "column norm_weight": column(torch.ones(3), a["weight"]),
        "column gradient": column(a["norm_weight"].clone().requires_grad_(), a["weight"]),
    }
    messages = {}
    with Collectives() as collectives:
        for name, attempt in wrong.items():
            try:
                attempt()
                messages[name] = "accepted"
            except (ValueError, TypeError, NotImplementedError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
    messages["collectives"] = str(sum(collectives.counts.values()))
    return messages

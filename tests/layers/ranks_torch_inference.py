"""What the ranks run for the layers of inference: errors against one process, collectives, paths, refusals (tests/ranks.py)."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loss.ranks_torch_loss import distance, draw, group_of
from tests.mlp.ranks_torch_engines import Collectives
from tiled_torch import parallel
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.layers import inference_symmetric

HIDDEN, FEATURES, EPS = 8, 16, 1e-5


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(x: Tensor, weight: Tensor) -> Tensor:
    a = x.to(wide(x.dtype))
    return (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + EPS) * weight.to(a.dtype)).to(x.dtype)


def problem(ranks: int, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Tensor]:
    """So many tokens, or two a rank, in each of three sequences; tokens are dim 0."""
    tokens = 2 * ranks if tokens is None else tokens
    shapes = {
        "x": (tokens, 3, HIDDEN),
        "weight": (FEATURES, HIDDEN),
        "bias": (FEATURES,),
        "norm_weight": (HIDDEN,),
        "residual": (tokens, 3, FEATURES),
        "next_norm_weight": (FEATURES,),
    }
    return {name: draw(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}


def column_expected(a: dict[str, Tensor]) -> Tensor:
    return F.linear(norm(a["x"], a["norm_weight"]), a["weight"], a["bias"])


def row_expected(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One process: the layer's result is rounded, then the sum with the residual."""
    h = F.linear(a["x"], a["weight"])
    more = wide(h.dtype)
    h = (h.to(more) + a["residual"].to(more) + a["bias"].to(more)).to(h.dtype)
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
    sizes: list[int] | None = None,
    symmetric_memory: bool = False,
) -> dict[str, Any] | None:
    """Both functions. symmetric_memory: the wiring of that path, its three exchanges made by the backend's collectives.

    sizes: tokens of every rank, two where left out.
    """
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    given = problem(ranks, getattr(torch, dtype), None if sizes is None else sum(sizes))
    if not bias:
        given["bias"] = torch.zeros_like(given["bias"])
    exact = {name: a.double() for name, a in given.items()}
    tokens = lambda a: a.split(sizes or 2)[rank]  # noqa: E731
    part = lambda a, dim: a.chunk(ranks, dim)[rank]  # noqa: E731
    with torch.no_grad(), Collectives() as column:
        y = parallel.norm_column_parallel_linear(
            tokens(given["x"]) if sequence_parallel else given["x"],
            given["norm_weight"],
            part(given["weight"], 0),
            part(given["bias"], 0) if bias else None,
            eps=EPS,
            sequence_parallel=sequence_parallel,
            split_sizes=sizes if sequence_parallel else None,
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
            split_sizes=sizes,
            path=path,
            group=over,
        )
    plain, truth = row_expected(given), row_expected(exact)
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


class Mapped:
    """The handle of a buffer that every rank maps, on CPUs: what the others wrote is fetched where they are waited for."""

    def __init__(self, over: RankGroup, memory: Tensor) -> None:
        self.over, self.memory = over, memory
        self.found: list[Tensor] | None = None

    def barrier(self, timeout_ms: int) -> None:
        """Before reading, then after."""
        reading = self.found is None
        self.found = (
            list(transport.all_gather(self.over, self.memory, 0).wait().chunk(self.over.size)) if reading else None
        )

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self.found is not None, "read before the others have written"
        return self.found[rank].view(sizes)


class emulated:
    """The name of the path to ask for; with symmetric memory its buffers are stood in for, and the multicast stores."""

    def __init__(self, wanted: bool) -> None:
        self.wanted, self.buffers = wanted, dict[str, Any]()

    def __enter__(self) -> str:
        if not self.wanted:
            return "auto"

        def buffer(over: RankGroup, use: str, elements: int, dtype: torch.dtype, device: torch.device) -> Any:
            if use not in self.buffers:
                memory = torch.full((elements,), torch.nan, dtype=dtype, device=device)
                self.buffers[use] = inference_symmetric._Buffer(memory, Mapped(over, memory))
            return self.buffers[use]

        def gathered(over: RankGroup, mine: Tensor) -> Tensor:
            return transport.all_gather(over, mine, 0).wait()

        changes = {"why_not": lambda *_: None, "_buffer": buffer, "all_gather_rows": gathered}
        self.patch = mock.patch.multiple(inference_symmetric, **changes)
        self.patch.start()
        return "symmetric_memory"

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.patch.stop()
            assert all(buffer.handle.found is None for buffer in self.buffers.values()), "left before all had read"


def both_paths(rank: int, world: int, dtype: str, group: str = "default") -> list[bool] | None:
    """Whether normed and h are the same to the last bit on either path."""
    over, rank, world = group_of(group, rank, world)
    if rank < 0:
        return None
    a = problem(world, getattr(torch, dtype))
    given = (a["x"].chunk(world, -1)[rank], a["weight"].chunk(world, 1)[rank], a["residual"].chunk(world)[rank])
    results = []
    for wanted in (False, True):
        with torch.no_grad(), emulated(wanted) as path:
            call = parallel.row_parallel_linear_residual_norm
            results.append(call(*given, a["next_norm_weight"], a["bias"], eps=EPS, path=path, group=over))
    return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


def path_of_sizes(rank: int, world: int, sizes: list[int]) -> dict[str, Any]:
    """Where symmetric memory can run: what path="auto" sends, and what asking for symmetric memory gives."""
    a = problem(world, torch.float32, sum(sizes))
    given = (a["x"].chunk(world, -1)[rank], a["weight"].chunk(world, 1)[rank], a["residual"].split(sizes)[rank])

    def call(path: str) -> Any:
        return parallel.row_parallel_linear_residual_norm(*given, a["next_norm_weight"], split_sizes=sizes, path=path)

    with torch.no_grad(), Collectives() as collectives, emulated(True) as fused:
        call("auto")
        sent = dict(collectives.counts)
        try:
            call(fused)
            return {"auto": sent, "fused": "taken"}
        except NotImplementedError as error:
            return {"auto": sent, "fused": f"{type(error).__name__}: {error}"}


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

    def column(norm_weight: Tensor = a["norm_weight"], weight: Tensor = a["weight"], **more: Any) -> Callable[[], Any]:
        return lambda: parallel.norm_column_parallel_linear(a["x"], norm_weight, weight, **more)

    wrong = {
        "path": row(path="fast"),
        "symmetric memory": row(path="symmetric_memory"),
        "residual": row(2, a["residual"]),
        "dtype of residual": row(2, right[2].double()),
        "norm_weight": row(3, torch.ones(3)),
        "tokens": row(0, right[0][:-1]),
        "sum of sizes": row(split_sizes=[3, 2]),
        "sizes of three": row(split_sizes=[2, 1, 1]),
        "size below 0": row(split_sizes=[5, -1]),
        "sizes that are none": row(split_sizes=4),
        "residual of sizes": row(split_sizes=[3, 1]),
        "eps": row(eps=-1.0),
        "gather": row(gather=1),
        "weight": row(1, torch.ones(FEATURES, 3)),
        "gradient": row(1, right[1].clone().requires_grad_()),
        "column norm_weight": column(torch.ones(3)),
        "column gradient": column(a["norm_weight"].clone().requires_grad_()),
        "column sizes": column(split_sizes=[4, 0]),
        "column part": column(split_sizes=[3, 1], sequence_parallel=True),
        "column sizes of one": column(split_sizes=[4], sequence_parallel=True),
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

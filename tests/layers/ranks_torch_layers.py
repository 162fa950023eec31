"""What the ranks run for the layers that are split over them: errors against one process, collectives, order of calls.

Every rank makes the whole problem from a seed, keeps its part, and compares what it gets with its part of the result that
one process computes. See tests/ranks.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.config import ParallelLinearOptions
from tests.loss.ranks_torch_loss import distance, draw, group_of
from tests.mlp.ranks_torch_engines import Collectives, compares
from tiled_torch import parallel
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import rank_group

FEATURES, OUTPUTS = 8, 24


def stretch(whole: Tensor, dim: int, rank: int, ranks: int, stride: int = 1) -> Tensor:
    """This rank's part: of each of `stride` fused parts."""
    return torch.cat([part.chunk(ranks, dim)[rank] for part in whole.chunk(stride, dim)], dim)


def tokens_of(whole: Tensor, dim: int, rank: int, sizes: list[int]) -> Tensor:
    return whole.split(sizes, dim)[rank]


class Problem:
    """A linear layer on one process: x, weight, bias, dy and all results, in float64 or rounded to another dtype."""

    def __init__(self, sizes: list[int], sequence_dim: int, dtype: torch.dtype) -> None:
        lead = [3, 3]
        lead[sequence_dim] = sum(sizes)
        self.x, self.weight = draw(*lead, FEATURES, seed=0).to(dtype), draw(OUTPUTS, FEATURES, seed=1).to(dtype)
        self.bias, self.dy = draw(OUTPUTS, seed=2).to(dtype), draw(*lead, OUTPUTS, seed=3).to(dtype)
        self.exact = self.results(torch.float64)
        self.untiled = self.results(dtype)

    def results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [a.detach().to(dtype, copy=True).requires_grad_() for a in (self.x, self.weight, self.bias)]
        y = F.linear(*leaves)
        y.backward(self.dy.to(dtype))
        return {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"), (leaf.grad for leaf in leaves), strict=True))}  # type: ignore[dict-item]


def errors(found: dict[str, Tensor | None], parts: dict[str, Any], problem: Problem) -> dict[str, dict[str, float]]:
    """Of each result, the relative error of ours and of the untiled layer in the same dtype, on this rank's part."""
    answer = {}
    for name, part in parts.items():
        ours, exact = found[name], part(problem.exact[name])
        answer[name] = {
            "ours": distance(None if ours is None else ours.detach().double(), exact),
            "untiled": distance(part(problem.untiled[name]).double(), exact),
        }
    return answer


def linears(rank: int, world: int, kind: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """`linear` of every case; each kind of group is made once. None on a rank that is not in it."""
    groups, found = dict[str, Any](), {}
    for name, given in cases.items():
        group = given.get("group", "default")
        if group not in groups:
            groups[group] = group_of(group, rank, world)
        found[name] = linear(rank, world, kind, **given | {"group": groups[group]})
    return None if None in found.values() else found


def linear(
    rank: int,
    world: int,
    kind: str,
    group: Any = "default",
    sizes: list[int] | None = None,
    sequence_dim: int = 0,
    sequence_parallel: bool = False,
    gather_output: bool = False,
    input_is_parallel: bool = True,
    dtype: str = "float64",
    frozen: tuple[str, ...] = (),
    bias: bool = True,
    backwards: int = 1,
    main_grad: str | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """One call of the functional form of `kind`: column, row or frozen. group: a name, or what `group_of` says of it."""
    over, rank, ranks = group_of(group, rank, world) if isinstance(group, str) else group
    if rank < 0:
        return None
    given = sizes is not None
    sizes = sizes or [2] * ranks
    problem = Problem(sizes, sequence_dim, getattr(torch, dtype))
    chosen = ParallelLinearOptions(sequence_dim=sequence_dim, **options)
    stride = chosen.stride

    def own_tokens(whole: Tensor) -> Tensor:
        return tokens_of(whole, sequence_dim, rank, sizes) if sequence_parallel else whole

    def own(dim: int) -> Any:
        return lambda whole: stretch(whole, dim, rank, ranks, stride)

    same = lambda whole: whole  # noqa: E731
    if kind == "row":
        of_x = own(-1) if input_is_parallel else same
        of_y, of_weight, of_bias, of_dy = own_tokens, own(1), same, own_tokens
    else:
        of_x, of_weight, of_bias = own_tokens, own(0), own(0)
        of_y = of_dy = same if gather_output else own(-1)
    leaves = {
        "x": of_x(problem.x).clone().requires_grad_("x" not in frozen),
        "weight": nn.Parameter(of_weight(problem.weight).clone(), requires_grad="weight" not in frozen),
        "bias": nn.Parameter(of_bias(problem.bias).clone(), requires_grad="bias" not in frozen),
    }
    weight = leaves["weight"]
    if chosen.gradient_accumulation_fusion:
        wide, before = (torch.float64, 5.0) if dtype == "float64" else (torch.float32, 0.0)
        wide = wide if main_grad is None else getattr(torch, main_grad)
        weight.main_grad = torch.full(weight.shape, before, dtype=wide)
    keywords: dict[str, Any] = {"sequence_parallel": sequence_parallel, "options": chosen, "group": over}
    if given:
        keywords["split_sizes"] = sizes
    if kind == "column":
        keywords["gather_output"] = gather_output
    elif kind == "row":
        keywords["input_is_parallel"] = input_is_parallel
    names = {"column": "column_parallel_linear", "row": "row_parallel_linear", "frozen": "linear_with_frozen_weight"}
    function = getattr(parallel, names[kind])
    kept: list[Tensor] = []

    def keep(a: Tensor) -> Tensor:
        kept.append(a)
        return a

    with Collectives() as forward, torch.autograd.graph.saved_tensors_hooks(keep, same):
        y = function(leaves["x"], weight, leaves["bias"] if bias else None, **keywords)
    with Collectives() as backward:
        for _ in range(backwards):
            y.backward(of_dy(problem.dy), retain_graph=backwards > 1)
    found: dict[str, Any] = {"y": y, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    found |= {name: a / backwards for name, a in found.items() if name != "y" and a is not None}
    if not bias:
        found["y"] = y + (problem.bias if kind == "row" or gather_output else own(0)(problem.bias))
    parts = {"y": of_y, "dx": of_x, "dweight": of_weight, "dbias": of_bias}
    for name in (*frozen, *([] if bias else ["bias"])):
        del parts[f"d{name}"]
    left_out = weight.grad is None
    with Collectives() as later:
        calls = parallel.deferred_weight_grad(weight)
    if chosen.gradient_accumulation_fusion:
        found["dweight"] = (weight.main_grad - before) / backwards
    elif chosen.defer_weight_grad:
        found["dweight"] = None if weight.grad is None else weight.grad / backwards
    if chosen.explicit_expert_comm and kind == "row":
        found["y"] = transport.all_reduce(rank_group("test", over), y.detach()).wait() + problem.bias
    elif (chosen.disable_grad_reduce or chosen.explicit_expert_comm) and found["dx"] is not None:
        found["dx"] = transport.all_reduce(rank_group("test", over), found["dx"]).wait()
    return {
        "errors": errors(found, parts, problem),
        "collectives": [dict(counted.counts) for counted in (forward, backward, later)],
        "grad is None": left_out,
        "view": y._is_view(),
        "deferred": calls,
        "kept": sorted(a.numel() for a in kept),
        "dtypes": sorted({str(a.dtype) for a in (y, *(leaf.grad for leaf in leaves.values())) if a is not None}),
    }


class Order(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of products and collectives in the order in which they start, and of the waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if (func.namespace == "c10d" and not compares(func, args)) or name in ("mm", "addmm", "bmm"):
            self.calls.append(name.strip("_"))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        wait = transport.Pending.wait

        def noted(pending: transport.Pending) -> Tensor:
            if pending.work is not None:
                self.calls.append("wait")
            return wait(pending)

        with self, mock.patch.object(transport.Pending, "wait", noted):
            yield


def order(rank: int, world: int, sequence_parallel: bool, asynchronous: bool) -> list[str]:
    """What backward does, in order."""
    x, weight = draw(4, 8, seed=0).requires_grad_(), nn.Parameter(draw(6, 8, seed=1))
    options = ParallelLinearOptions(async_grad_reduce=asynchronous)
    y = parallel.column_parallel_linear(x, weight, sequence_parallel=sequence_parallel, options=options)
    calls = Order()
    with calls.watching():
        y.backward(torch.ones_like(y))
    return calls.calls


def mlp(
    rank: int, world: int, sizes: list[int] | None, skip_bias_add: bool, checkpointed: bool, group: str = "default"
) -> dict[str, float] | None:
    """Column, gelu and row as modules with sequence parallelism, against two linear layers; errors of y and gradients."""
    over, rank, world = group_of(group, rank, world)
    if rank < 0:
        return None
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)
    tokens = sizes or [3] * world
    x, dy = draw(sum(tokens), 8, seed=4).requires_grad_(), draw(sum(tokens), 8, seed=5)
    expected = second(F.gelu(first(x)))
    expected.backward(dy)
    torch.manual_seed(0)
    common: dict[str, Any] = {"sequence_parallel": True, "skip_bias_add": skip_bias_add}
    common |= {"dtype": torch.float64, "group": over}
    column = parallel.ColumnParallelLinear(8, 16, **common)
    row = parallel.RowParallelLinear(16, 8, input_is_parallel=True, **common)

    def run(x: Tensor) -> Tensor:
        h = column(x, split_sizes=sizes)
        h = h[0] + h[1] if skip_bias_add else h
        y = row(F.gelu(h), split_sizes=sizes)
        return y[0] + y[1] if skip_bias_add else y

    mine = x.detach().split(tokens)[rank].clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(run, mine, use_reentrant=False) if checkpointed else run(mine)
    y.backward(dy.split(tokens)[rank])
    pairs = {
        "y": (y, expected.split(tokens)[rank]),
        "dx": (mine.grad, x.grad.split(tokens)[rank]),  # type: ignore[union-attr]
        "column.weight": (column.weight.grad, first.weight.grad.chunk(world)[rank]),  # type: ignore[union-attr]
        "column.bias": (column.bias.grad, first.bias.grad.chunk(world)[rank]),  # type: ignore[union-attr]
        "row.weight": (row.weight.grad, second.weight.grad.chunk(world, 1)[rank]),  # type: ignore[union-attr]
        "row.bias": (row.bias.grad, second.bias.grad),
    }
    return {name: distance(found, exact) for name, (found, exact) in pairs.items()}


def expert(rank: int, world: int, sizes: list[int]) -> dict[str, float]:
    """Two layers of an expert between collectives of the caller's own, against two linear layers; collectives inside."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)
    x, dy = draw(sum(sizes), 8, seed=4).requires_grad_(), draw(sum(sizes), 8, seed=5)
    expected = second(F.gelu(first(x)))
    expected.backward(dy)
    torch.manual_seed(0)
    group = group_of("mesh", rank, world)[0]
    options = ParallelLinearOptions(is_expert=True, explicit_expert_comm=True)
    common: dict[str, Any] = {"options": options, "dtype": torch.float64, "group": group}
    column = parallel.ColumnParallelLinear(8, 16, **common)
    row = parallel.RowParallelLinear(16, 8, input_is_parallel=True, skip_bias_add=True, **common)
    mine = x.detach().split(sizes)[rank].clone().requires_grad_()
    tokens = parallel.gather_from_sequence_parallel_region(mine, split_sizes=sizes, group=group)
    with Collectives() as inside:
        part, bias = row(F.gelu(column(tokens)))
    with Collectives() as backward:
        dpart = torch.ones_like(part)
        dtokens = torch.autograd.grad(part, (tokens, *column.parameters(), row.weight), dpart, retain_graph=True)
    y = parallel.reduce_scatter_to_sequence_parallel_region(part, split_sizes=sizes, group=group) + bias
    y.backward(dy.split(sizes)[rank])
    dbias = transport.all_reduce(rank_group("test", group), row.bias.grad).wait()  # type: ignore[arg-type, union-attr]
    pairs = {
        "y": (y, expected.split(sizes)[rank]),
        "dx": (mine.grad, x.grad.split(sizes)[rank]),  # type: ignore[union-attr]
        "column.weight": (column.weight.grad, first.weight.grad.chunk(world)[rank]),  # type: ignore[union-attr]
        "column.bias": (column.bias.grad, first.bias.grad.chunk(world)[rank]),  # type: ignore[union-attr]
        "row.weight": (row.weight.grad, second.weight.grad.chunk(world, 1)[rank]),  # type: ignore[union-attr]
        "row.bias": (dbias, second.bias.grad),
    }
    calls = sum(sum(counted.counts.values()) for counted in (inside, backward))
    assert len(dtokens) == 4
    return {"inside": calls} | {name: distance(found, exact) for name, (found, exact) in pairs.items()}


def bfloat16_autocast(rank: int, world: int) -> dict[str, Any]:
    """float32 parameters under autocast: dtypes, and errors beside those of nn.Linear under autocast."""
    torch.manual_seed(0)
    whole = nn.Linear(8, 16)
    torch.manual_seed(0)
    layer = parallel.ColumnParallelLinear(8, 16)
    x = draw(6, 8, seed=4).float()
    dy = draw(6, 16, seed=5).float()
    exact = F.linear(x.double(), whole.weight.double(), whole.bias.double())
    dexact = dy.double().T @ x.double()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = whole(x), layer(x)
    theirs.backward(dy.bfloat16())
    ours.backward(dy.bfloat16().chunk(world, -1)[rank])
    cut = lambda a, dim: a.chunk(world, dim)[rank].double()  # noqa: E731
    return {
        "dtypes": [str(ours.dtype), str(layer.weight.grad.dtype), str(layer.bias.grad.dtype)],  # type: ignore[union-attr]
        "y": [distance(ours.double(), cut(exact, -1)), distance(cut(theirs, -1), cut(exact, -1))],
        "dweight": [
            distance(layer.weight.grad.double(), cut(dexact, 0)),  # type: ignore[union-attr]
            distance(cut(whole.weight.grad, 0), cut(dexact, 0)),
        ],
    }

"""What the ranks run for the collectives: every case of the specification, other layouts and dtypes, wrong calls.

Every rank makes the inputs of all ranks, so that what it should get is known to it. See tests/ranks.py.
"""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shared_specs.collectives.cases import CollectiveCase, collective_cases
from tests.layers.ranks_torch_layers import Order
from tests.loss.ranks_torch_loss import distance, group_of
from tests.mlp.ranks_torch_engines import Collectives
from tiled_torch import parallel
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import rank_group


def arguments_of(case: CollectiveCase, rank: int) -> dict[str, Any]:
    """The keyword arguments of one rank."""
    sizes = case.arguments.get("sizes")
    if sizes is None:
        return dict(case.arguments)
    return {"input_split_sizes": sizes[rank], "output_split_sizes": [row[rank] for row in sizes]}


def call(case: CollectiveCase, rank: int, group: Any) -> Callable[[Tensor], Tensor]:
    function, arguments = getattr(parallel, case.name), arguments_of(case, rank)
    return lambda x: function(x, **arguments, group=group)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, contiguous or with dims in the opposite order and gaps between them."""
    if layout == "contiguous":
        return x.clone()
    gaps = torch.full([2 * size for size in reversed(x.shape)], torch.nan, dtype=x.dtype)
    strided = gaps[tuple(slice(None, None, 2) for _ in x.shape)].permute(*reversed(range(x.dim())))
    strided.copy_(x)
    return strided


def cases(
    rank: int, world: int, group: str = "default", layout: str = "contiguous", dtype: str = "float64"
) -> dict[str, Any] | None:
    """Case -> relative errors of y and dx, with how many collectives ran forward and backward."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    kind, found = getattr(torch, dtype), {}
    for case in collective_cases(ranks):
        inputs, gradients = (
            [torch.from_numpy(a).to(kind) for a in arrays] for arrays in (case.inputs(), case.output_gradients())
        )
        y_expected = case.outputs([a.double().numpy() for a in inputs])[rank]
        dx_expected = case.input_gradients([a.double().numpy() for a in gradients])[rank]
        x = laid_out(inputs[rank], layout).requires_grad_()
        before = x.detach().clone()
        with Collectives() as forward:
            y = call(case, rank, over)(x)
        upstream = laid_out(gradients[rank], layout)
        with Collectives() as backward:
            (dx,) = torch.autograd.grad(y, x, upstream)
        assert (y.dtype, dx.dtype) == (kind, kind)
        assert torch.equal(x, before), "x was written to"
        assert torch.equal(upstream, gradients[rank]), "the upstream gradient was written to"
        found[case.id] = {
            "y": distance(y.detach().double(), torch.from_numpy(y_expected)),
            "dx": distance(dx.double(), torch.from_numpy(dx_expected)),
            "collectives": [sum(forward.counts.values()), sum(backward.counts.values())],
            "rounded once": [
                torch.equal(a, torch.from_numpy(exact).to(kind)) for a, exact in ((y, y_expected), (dx, dx_expected))
            ],
        }
    return found


def sums_of_16_bits(rank: int, world: int, dtype: str, few: int) -> dict[str, Any]:
    """Sums over the ranks, of up to `few` elements and of more: collectives, results, and what a backward does in order."""
    kind = getattr(torch, dtype)
    whole = torch.stack([torch.randn(world, 7, generator=torch.Generator().manual_seed(one)) for one in range(world)])
    parts = whole.to(kind)
    exact = parts.double().sum(0).to(kind)
    x = parts[rank].clone()
    with mock.patch.object(transport, "SMALL_ELEMENTS", few):
        with Collectives() as reduced:
            y = parallel.reduce_from_tensor_parallel_region(x)
        with Collectives() as scattered:
            row = parallel.reduce_scatter_to_sequence_parallel_region(x)
        odd = parts[rank, 0, :5].clone()  # 5 elements are no equal parts
        pending = transport.all_reduce_(rank_group("test", None), odd)
        torch.ones(3, 3) @ torch.ones(3, 3)
        over = pending.wait()
        weight = nn.Parameter(torch.ones(2, 7, dtype=kind))
        out = parallel.column_parallel_linear(x.clone().requires_grad_(), weight)
        order = Order()
        with order.watching():
            out.backward(torch.ones_like(out))
    return {
        "reduced": dict(reduced.counts),
        "scattered": dict(scattered.counts),
        "exact": [torch.equal(y, exact), torch.equal(row, exact[rank : rank + 1]), torch.equal(over, exact[0, :5])],
        "in place": over.data_ptr() == odd.data_ptr(),
        "untouched": torch.equal(x, parts[rank]),
        "order": order.calls,
    }


def derivatives(rank: int, world: int) -> dict[str, Any]:
    """Case -> errors of the gradient under both forms of checkpointing, of a zero-stride gradient, of the second derivative."""
    found = {}
    for case in collective_cases(world):
        function = call(case, rank, None)
        inputs, gradients = (
            [torch.from_numpy(a) for a in arrays] for arrays in (case.inputs(), case.output_gradients())
        )
        dx_expected = torch.from_numpy(case.input_gradients(case.output_gradients())[rank])
        errors = {}
        for reentrant in (False, True):
            x = inputs[rank].clone().requires_grad_()
            y = checkpoint(lambda x, function=function: function(2 * x), x, use_reentrant=reentrant)
            y.backward(gradients[rank])
            errors[f"checkpoint {reentrant}"] = distance(x.grad, 2 * dx_expected)
        x = inputs[rank].clone().requires_grad_()
        function(x).sum().backward()  # its gradient has stride zero
        ones = [torch.ones_like(dy).numpy() for dy in gradients]
        errors["zero stride"] = distance(x.grad, torch.from_numpy(case.input_gradients(ones)[rank]))
        # dx = back(dy) is linear in dy, and the gradient of dy from upstream v is there(v).
        x, dy = inputs[rank].clone().requires_grad_(), gradients[rank].clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
        (second,) = torch.autograd.grad(dx, dy, inputs[rank])
        errors["second"] = distance(second, torch.from_numpy(case.outputs(case.inputs())[rank]))
        found[case.id] = errors
    return found


def one_rank(rank: int, world: int) -> list[list[Any]]:
    """In a group of one: how many collectives ran and which results are not x itself."""
    groups = [dist.new_group([one]) for one in range(world)]
    with Collectives() as collectives:
        copies = []
        for case in collective_cases(1):
            x = torch.from_numpy(case.inputs()[0]).requires_grad_()
            if call(case, 0, groups[rank])(x) is not x:
                copies.append(case.id)
    return [[sum(collectives.counts.values())], copies]


def integers(rank: int, world: int) -> list[Any]:
    """Token ids travel without gradients."""
    ids = torch.arange(world * 2)
    mine = parallel.scatter_to_sequence_parallel_region(ids)
    return [mine.tolist(), parallel.gather_from_sequence_parallel_region(mine).tolist(), mine.requires_grad]


def compiled(rank: int, world: int) -> float:
    """The gradient through torch.compile."""
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return parallel.gather_from_sequence_parallel_region(x.sin()).cos() * (rank + 1)

    (expected,) = torch.autograd.grad(function(x).sum(), x)
    with (
        warnings.catch_warnings()
    ):  # dynamo looks at .grad of what it resumes with and hides the warning, not the error
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        y = torch.compile(function, backend="aot_eager")(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    return distance(found, expected)


def refused(rank: int, world: int) -> dict[str, str]:
    """Wrong call -> its error, on this rank alone: the other ranks make no call at all."""
    messages: dict[str, str] = {}
    inside = dist.new_group([0])
    if rank != 0:
        wrong: dict[str, Callable[[], Any]] = {
            "outside": lambda: parallel.copy_to_tensor_parallel_region(torch.ones(2), group=inside)
        }
    else:
        wrong = _wrong_calls(world)
    with Collectives() as collectives:
        for name, attempt in wrong.items():
            try:
                attempt()
                messages[name] = "accepted"
            except (ValueError, TypeError, NotImplementedError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
    messages["collectives"] = str(sum(collectives.counts.values()))
    return messages


def _wrong_calls(world: int) -> dict[str, Callable[[], Any]]:
    x = torch.ones(5, 3)
    p = parallel
    return {
        "last dim": lambda: p.scatter_to_tensor_parallel_region(x),
        "last dim summed": lambda: p.reduce_scatter_last_dim_to_tensor_parallel_region(x),
        "tokens": lambda: p.scatter_to_sequence_parallel_region(x),
        "tokens summed": lambda: p.reduce_scatter_to_sequence_parallel_region(x, dim=-1),
        "sum of sizes": lambda: p.scatter_to_sequence_parallel_region(x, split_sizes=[3] * world),
        "own size": lambda: p.gather_from_sequence_parallel_region(x, split_sizes=[4] * world),
        "count of sizes": lambda: p.scatter_to_sequence_parallel_region(x, split_sizes=[5] * (world + 1)),
        "negative size": lambda: p.scatter_to_sequence_parallel_region(x, split_sizes=[6, -1] + [0] * (world - 2)),
        "kind of sizes": lambda: p.scatter_to_sequence_parallel_region(x, split_sizes=5),  # type: ignore[arg-type]
        "kind of size": lambda: p.scatter_to_sequence_parallel_region(x, split_sizes=[2.5] * world),  # type: ignore[list-item]
        "dim": lambda: p.gather_from_sequence_parallel_region(x, dim=2),
        "kind of dim": lambda: p.gather_from_sequence_parallel_region(x, dim=1.0),  # type: ignore[arg-type]
        "flag": lambda: p.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=1),  # type: ignore[arg-type]
        "no dims": lambda: p.gather_from_tensor_parallel_region(torch.ones(())),
        "rows": lambda: p.all_to_all(x),
        "one of two": lambda: p.all_to_all(x, input_split_sizes=[5] + [0] * (world - 1)),
        "sum of rows": lambda: p.all_to_all(x, input_split_sizes=[1] * world, output_split_sizes=[1] * world),
        "rows to itself": lambda: p.all_to_all(
            x, input_split_sizes=[5] + [0] * (world - 1), output_split_sizes=[4] + [0] * (world - 1)
        ),
        "hidden": lambda: p.all_to_all_sequence_to_hidden(x),
        "sequence": lambda: p.all_to_all_hidden_to_sequence(x),
        "one dim": lambda: p.all_to_all_hidden_to_sequence(torch.ones(4)),
        "x": lambda: p.copy_to_tensor_parallel_region([1.0]),  # type: ignore[arg-type]
        "group": lambda: p.copy_to_tensor_parallel_region(x, group=3),
    }


def meshes(rank: int, world: int) -> list[str]:
    """What a mesh of two dims and a DTensor are told."""
    whole = distribute_tensor(torch.ones(world, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    messages = []
    for attempt in (
        lambda: parallel.copy_to_tensor_parallel_region(torch.ones(2), group=init_device_mesh("cpu", (1, world))),
        lambda: parallel.reduce_from_tensor_parallel_region(whole),
    ):
        try:
            attempt()
            messages.append("accepted")
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages

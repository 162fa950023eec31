"""What the ranks run for parameters of the layers: initial values, attributes, experts, embeddings, errors."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shared_specs.collectives.partitions import vocab_range
from shared_specs.config import ParallelLinearOptions
from tests.layers.ranks_torch_layers import stretch
from tests.loss.ranks_torch_loss import distance, draw, group_of
from tests.mlp.ranks_torch_engines import Collectives, compares
from tiled_torch import parallel


def initial(rank: int, world: int, group: str = "default", dtype: str = "float32") -> dict[str, bool] | None:
    """Whether each layer starts as a slice of the layer on one process, bit by bit, and leaves the generator as it does."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    like: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    found = {}

    def compare(name: str, make: Callable[[], nn.Module], ours: Callable[[], nn.Module], dims: dict[str, Any]) -> None:
        torch.manual_seed(7)
        whole, after = make(), torch.rand(3)
        torch.manual_seed(7)
        mine = ours()
        found[f"{name} generator"] = torch.equal(after, torch.rand(3))
        for parameter, (dim, stride) in dims.items():
            expected = getattr(whole, parameter)
            expected = expected if dim is None else stretch(expected, dim, rank, ranks, stride)
            found[f"{name} {parameter}"] = torch.equal(getattr(mine, parameter), expected)

    def by_method() -> nn.Module:
        whole = nn.Linear(12, 16, **like)
        nn.init.normal_(whole.weight, std=0.02)
        nn.init.zeros_(whole.bias)
        return whole

    normal = lambda weight: nn.init.normal_(weight, std=0.02)  # noqa: E731
    column, row = parallel.ColumnParallelLinear, parallel.RowParallelLinear
    plain = lambda: nn.Linear(12, 16, **like)  # noqa: E731
    fused = ParallelLinearOptions(stride=2)
    both = {"weight": (0, 1), "bias": (0, 1)}
    compare("column", plain, lambda: column(12, 16, group=over, **like), both)
    strided = {"weight": (0, 2), "bias": (0, 2)}
    compare("fused column", plain, lambda: column(12, 16, options=fused, group=over, **like), strided)
    compare("column by method", by_method, lambda: column(12, 16, init_method=normal, group=over, **like), both)
    compare(
        "row",
        lambda: nn.Linear(16, 12, **like),
        lambda: row(16, 12, group=over, **like),
        {"weight": (1, 1), "bias": (None, 1)},
    )
    compare(
        "fused row",
        lambda: nn.Linear(16, 12, **like),
        lambda: row(16, 12, options=fused, group=over, **like),
        {"weight": (1, 2), "bias": (None, 1)},
    )
    make = lambda: nn.Embedding(4 * ranks, 6, **like)  # noqa: E731
    compare(
        "embedding", make, lambda: parallel.VocabParallelEmbedding(4 * ranks, 6, group=over, **like), {"weight": (0, 1)}
    )
    torch.manual_seed(7)
    whole = nn.Linear(12, 16, **like)
    meta = column(12, 16, group=over, device="meta", **like).to_empty(device="cpu")
    torch.manual_seed(7)
    meta.reset_parameters()
    found["from the meta device"] = torch.equal(meta.weight, stretch(whole.weight, 0, rank, ranks))  # type: ignore[arg-type]
    found["generator of every rank"] = len({*_gathered(torch.rand(1).item(), over)}) == 1
    return found


def _gathered(value: float, group: Any) -> list[Any]:
    group = group.get_group() if hasattr(group, "get_group") else group
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def attributes(rank: int, world: int) -> dict[str, list[Any]]:
    """Of each parameter: its shape and the attributes that training engines read."""
    mesh = init_device_mesh("cpu", (world,))
    expert = ParallelLinearOptions(is_expert=True, stride=2)
    layers = {
        "column": parallel.ColumnParallelLinear(6, 8),
        "row": parallel.RowParallelLinear(8, 6),
        "expert": parallel.ColumnParallelLinear(6, 8, options=expert, group=mesh),
        "embedding": parallel.VocabParallelEmbedding(10, 6),
        "from meta": parallel.RowParallelLinear(8, 6, device="meta").to_empty(device="cpu"),
        "copied": copy.deepcopy(parallel.ColumnParallelLinear(6, 8, options=expert, group=dist.new_group())),
    }
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
    return {
        f"{kind}.{name}": [list(one.shape), *(getattr(one, attribute) for attribute in names)]
        for kind, layer in layers.items()
        for name, one in layer.named_parameters()
    }


def calls(rank: int, world: int) -> dict[str, Any]:
    """The run-time arguments of the column-parallel module, and biases that the caller adds."""
    x = draw(3, 6, seed=0)
    like: dict[str, Any] = {"dtype": torch.float64}
    shared = nn.Parameter(draw(8, 6, seed=1).chunk(world)[rank].clone())
    layer = parallel.ColumnParallelLinear(6, 8, bias=False, allocate_weight=False, **like)
    expected = F.linear(x, draw(8, 6, seed=1))
    gathered = layer(x, shared, runtime_gather_output=True)
    local = layer(x, weight=shared)
    owning = parallel.ColumnParallelLinear(6, 8, bias=False, gather_output=True, **like)
    deferring = parallel.ColumnParallelLinear(6, 8, options=ParallelLinearOptions(defer_weight_grad=True), **like)
    skipping = parallel.ColumnParallelLinear(6, 8, bias=False, skip_bias_add=True, **like)
    fused = ParallelLinearOptions(stride=2)
    apart = parallel.ColumnParallelLinear(6, 8, gather_output=True, skip_bias_add=True, options=fused, **like)
    together = copy.deepcopy(apart)
    together.skip_bias_add = False
    y, bias = apart(x)
    (y + bias).sum().backward()
    together(x).sum().backward()
    row = parallel.RowParallelLinear(8, 6, skip_bias_add=True, **like)
    wide = draw(3, 8, seed=2)
    z, row_bias = row(wide)
    (z + row_bias).sum().backward()
    in_row = copy.deepcopy(row)
    in_row.skip_bias_add = False
    deferring(2 * x.clone().requires_grad_()).sum().backward()
    ((kept, *_),) = deferring.weight.__dict__["_deferred_weight_grads"]  # type: ignore[union-attr]
    left_out = deferring.weight.grad is None  # type: ignore[union-attr]
    done = deferring.deferred_weight_grad()
    (gathered.sum() + local.sum()).backward()
    return {
        "parameters": [name for name, _ in layer.named_parameters()],
        "gathered": distance(gathered, expected),
        "local": distance(local, expected.chunk(world, -1)[rank]),
        "gradient": shared.grad is not None,
        "not gathered": list(owning(x, runtime_gather_output=False).shape),
        "instead of its own": distance(owning(x, shared), expected),
        "deferred": [left_out, done, deferring.deferred_weight_grad()],
        "deferred holds a graph": kept.requires_grad,
        "deferred gradient": distance(deferring.weight.grad, 2 * x.sum(0).expand(8 // world, 6)),  # type: ignore[union-attr]
        "skipped": skipping(x)[1] is None,
        "added later": distance((y + bias).detach(), together(x).detach()),
        "gradient added later": distance(apart.bias.grad, together.bias.grad),  # type: ignore[union-attr]
        "added after a row": distance((z + row_bias).detach(), in_row(wide).detach()),
        "gradient added after a row": distance(row.bias.grad, torch.full((6,), 3.0, dtype=torch.float64)),  # type: ignore[union-attr]
        "copied": torch.equal(copy.deepcopy(owning)(x), owning(x)),
    }


def tied(rank: int, world: int) -> dict[str, Any]:
    """A head that is given the embedding's weight and leaves its gradient for later: added to what the embedding's is."""
    ids, like = torch.tensor([5, 0, 5, 7]), {"dtype": torch.float64}
    torch.manual_seed(0)
    whole = nn.Embedding(8, 6, **like)  # type: ignore[arg-type]
    F.linear(whole(ids), whole.weight).square().sum().backward()
    torch.manual_seed(0)
    embedding = parallel.VocabParallelEmbedding(8, 6, **like)  # type: ignore[arg-type]
    options = ParallelLinearOptions(defer_weight_grad=True)
    head = parallel.ColumnParallelLinear(6, 8, bias=False, allocate_weight=False, options=options, **like)  # type: ignore[arg-type]
    head(embedding(ids), embedding.weight).square().sum().backward()
    expected = whole.weight.grad.chunk(world)[rank]  # type: ignore[union-attr]
    before = distance(embedding.weight.grad, expected)
    counts = [head.deferred_weight_grad(), parallel.deferred_weight_grad(embedding.weight)]
    return {"before": before, "after": distance(embedding.weight.grad, expected), "counts": counts}


def experts(rank: int, world: int) -> dict[str, Any]:
    """Two experts, each split over two ranks, with other tokens and another number of them: errors, groups and marks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("expert", "expert_tp"))
    over, number = mesh["expert_tp"], mesh["expert"].get_local_rank()
    options = ParallelLinearOptions(is_expert=True)
    torch.manual_seed(number)
    whole = [nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64)]
    torch.manual_seed(number)
    like: dict[str, Any] = {"dtype": torch.float64, "options": options, "group": over}
    up = parallel.ColumnParallelLinear(6, 8, **like)
    down = parallel.RowParallelLinear(8, 6, input_is_parallel=True, **like)
    x = draw(3 + 2 * number, 6, seed=number)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    with GroupSizes() as groups:
        y = down(F.gelu(up(mine)))
        y.sum().backward()
    expected = whole[1](F.gelu(whole[0](theirs)))
    expected.sum().backward()
    rank = over.get_local_rank()
    marks = {parameter.allreduce for layer in (up, down) for parameter in layer.parameters()}
    return {
        "errors": [
            distance(y.detach(), expected.detach()),
            distance(mine.grad, theirs.grad),  # type: ignore[arg-type]
            distance(up.weight.grad, whole[0].weight.grad.chunk(2)[rank]),  # type: ignore[union-attr]
            distance(down.bias.grad, whole[1].bias.grad),  # type: ignore[union-attr]
        ],
        "groups": groups.sizes,
        "allreduce": sorted(marks),
    }


class GroupSizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of ranks of the group of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not compares(func, args):
            group = next(one for one in args if isinstance(one, torch.ScriptObject))
            self.sizes.append(dist.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))


def embedding(
    rank: int,
    world: int,
    group: str = "default",
    vocab: int = 16,
    partition: str = "equal",
    scattered: bool = False,
    sequence_dim: int = 0,
    sizes: list[int] | None = None,
    deterministic: bool = False,
    dtype: str = "float64",
) -> dict[str, Any] | None:
    """Against torch's embedding on one process: y and the gradient of this rank's entries; equal to the last bit."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    lead = [4, 4]
    lead[sequence_dim] = sum(sizes or [2] * ranks)
    ids = torch.randint(vocab, lead, generator=torch.Generator().manual_seed(0))
    kind = getattr(torch, dtype)
    weight, dy = draw(vocab, 6, seed=1).to(kind), draw(*lead, 6, seed=2).to(kind)
    whole = weight.clone().requires_grad_()
    expected = F.embedding(ids, whole)
    expected.backward(dy)
    start, stop = vocab_range(vocab, ranks, rank)
    rows = stop - start
    if partition == "padded":
        rows = -(-vocab // ranks)
        start, stop = min(vocab, rank * rows), min(vocab, (rank + 1) * rows)
    mine = torch.full((rows, 6), torch.nan, dtype=kind)
    mine[: stop - start] = weight[start:stop]
    mine.requires_grad_()
    given: dict[str, Any] = {"vocab_size": None if partition == "equal" else vocab, "deterministic": deterministic}
    if scattered:
        given |= {"reduce_scatter_embeddings": True, "sequence_dim": sequence_dim, "split_sizes": sizes}
    with Collectives() as forward:
        y = parallel.vocab_parallel_embedding(ids, mine, **given, group=over)
    own = lambda a: a.split(sizes or [2] * ranks, sequence_dim)[rank] if scattered else a  # noqa: E731
    with Collectives() as backward:
        y.backward(own(dy))
    assert mine.grad is not None
    assert whole.grad is not None
    names = set()
    node = y.grad_fn
    while node is not None:
        names.add(type(node).__name__)
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return {
        "y": torch.equal(y, own(expected)),
        "dweight": distance(mine.grad[: stop - start].double(), whole.grad[start:stop].double()),
        "padding": float(mine.grad[stop - start :].abs().sum()),
        "collectives": [dict(counted.counts) for counted in (forward, backward)],
        "lookup": sorted(name for name in names if name.startswith(("Index", "Embedding"))),
    }


def extra_state(rank: int, world: int) -> dict[str, Any]:
    """A strict load of a checkpoint with Transformer Engine's keys, of which each layer has one that says nothing or more."""
    torch.manual_seed(3)
    layers = {
        "table": parallel.VocabParallelEmbedding(5, 4),
        "up": parallel.ColumnParallelLinear(4, 8),
        "down": parallel.RowParallelLinear(8, 4, input_is_parallel=True),
        "mlp": parallel.TensorParallelTiledMLP(4, 8),
    }
    model = nn.Sequential(OrderedDict(layers))
    wanted = {name: one.detach() + 1 for name, one in model.state_dict().items()}
    extra = {"table": None, "up": torch.zeros(3, dtype=torch.uint8), "down": io.BytesIO(b"0"), "mlp": None}
    given = wanted | {f"{name}._extra_state": value for name, value in extra.items()}
    keys = list(given)
    found = model.load_state_dict(given, strict=True)
    alone = layers["up"].load_state_dict(
        {"weight": wanted["up.weight"], "bias": wanted["up.bias"], "_extra_state": None}
    )
    try:
        model.load_state_dict(given | {"up.extra_state": None})
        message = "accepted"
    except RuntimeError as error:
        message = str(error)
    return {
        "loaded": all(torch.equal(one, wanted[name]) for name, one in model.state_dict().items()),
        "keys": [*found.missing_keys, *found.unexpected_keys, *alone.missing_keys, *alone.unexpected_keys],
        "written": [name for name in model.state_dict() if "extra" in name],
        "given": list(given) == keys,
        "other": message,
    }


def chunks(rank: int, world: int) -> dict[str, bool]:
    """Elements of a tensor dealt out and gathered again, with gradients, views and copies."""
    whole = draw(3, 4, seed=1).requires_grad_()
    dy = draw(12, seed=2)
    parts = parallel.split_tensor_into_1d_equal_chunks(whole)
    y = parallel.gather_split_1d_tensor(parts.sin())
    y.backward(dy)
    plain = whole.detach()
    view = parallel.split_tensor_into_1d_equal_chunks(plain)
    copied = parallel.split_tensor_into_1d_equal_chunks(plain, True)
    return {
        "part": torch.equal(parts, whole.flatten().chunk(world)[rank]),
        "y": torch.equal(y, whole.sin().flatten()),
        "gradient": torch.allclose(whole.grad.flatten(), dy * plain.cos().flatten(), rtol=0, atol=0),  # type: ignore[union-attr]
        "view": view.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr(),
        "copy": torch.equal(copied, view) and copied.untyped_storage().data_ptr() != plain.untyped_storage().data_ptr(),
    }


def refused(rank: int, world: int) -> dict[str, str]:
    """Wrong call -> its error, on rank 0 alone: the other ranks make no call."""
    if rank:
        return {}
    x, weight = torch.ones(3, 4), torch.ones(2, 4)
    p, o = parallel, ParallelLinearOptions
    explicit = o(explicit_expert_comm=True)
    fusing, deferring = o(gradient_accumulation_fusion=True), o(defer_weight_grad=True)
    parameter, small = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))
    small.main_grad = torch.zeros(2, 4, dtype=torch.float64)  # type: ignore[attr-defined]
    make, linear, row, frozen = (
        p.ColumnParallelLinear,
        p.column_parallel_linear,
        p.row_parallel_linear,
        p.linear_with_frozen_weight,
    )
    ids = torch.zeros(3, dtype=torch.long)
    wrong: dict[str, Callable[[], Any]] = {
        "weight": lambda: linear(x, torch.ones(2, 5)),
        "matrix": lambda: linear(x, torch.ones(4)),
        "bias": lambda: linear(x, weight, torch.ones(4)),
        "dtype": lambda: linear(x, weight.double()),
        "integers": lambda: linear(x.long(), weight.long()),
        "x": lambda: linear([1.0], weight),  # type: ignore[arg-type]
        "options": lambda: linear(x, weight, options=3),  # type: ignore[arg-type]
        "flag": lambda: linear(x, weight, sequence_parallel=1),  # type: ignore[arg-type]
        "option": lambda: linear(x, weight, options=o(async_grad_reduce=None)),  # type: ignore[arg-type]
        "stride": lambda: linear(x, weight, options=o(stride=0)),
        "stride of the rows": lambda: linear(x, weight, options=o(stride=3)),
        "both": lambda: linear(x, weight, sequence_parallel=True, options=o(disable_grad_reduce=True)),
        "row reduction": lambda: row(x, weight, options=o(disable_grad_reduce=True)),
        "limit": lambda: linear(x, weight, options=o(wgrad_deferral_limit=2)),
        "limit below zero": lambda: linear(x, weight, options=o(wgrad_deferral_limit=-1, defer_weight_grad=True)),
        "explicit": lambda: linear(x, weight, gather_output=True, options=explicit),
        "explicit tokens": lambda: linear(x, weight, sequence_parallel=True, options=explicit),
        "explicit row": lambda: row(x, weight, options=explicit),
        "explicit bias": lambda: row(x, weight, torch.ones(2), input_is_parallel=True, options=explicit),
        "explicit module": lambda: p.RowParallelLinear(4, 2, input_is_parallel=True, options=explicit),
        "row input": lambda: row(torch.ones(world, 4), weight, sequence_parallel=True),
        "row columns": lambda: row(torch.ones(3, 5), weight),
        "row tokens": lambda: row(x, weight, input_is_parallel=True, sequence_parallel=True),
        "sizes": lambda: linear(x, weight, split_sizes=[3] * world),
        "own size": lambda: linear(x, weight, sequence_parallel=True, split_sizes=[4] * world),
        "sequence dim": lambda: linear(x, weight, sequence_parallel=True, options=o(sequence_dim=1)),
        "expert": lambda: linear(x, weight, options=o(is_expert=True)),
        "main_grad": lambda: linear(x, parameter, options=fusing),
        "dtype of main_grad": lambda: linear(x, small, options=fusing),
        "leaf": lambda: linear(x, parameter * 2, options=deferring),
        "frozen": lambda: frozen(x, parameter),
        "frozen option": lambda: frozen(x, weight, options=deferring),
        "split": lambda: make(4, world + 1),
        "fused split": lambda: make(4, 2 * world, options=o(stride=4)),
        "features": lambda: make(0, 4),
        "init_method": lambda: make(4, 4 * world, init_method=3),  # type: ignore[arg-type]
        "no weight": lambda: make(4, 2 * world, allocate_weight=False)(x),
        "other weight": lambda: make(4, 2 * world)(x, torch.ones(3, 4)),
        "module expert": lambda: make(4, 2 * world, options=o(is_expert=True)),
        "id": lambda: p.vocab_parallel_embedding(ids + 2 * world, weight),
        "ids": lambda: p.vocab_parallel_embedding(ids.float(), weight),
        "vocab_size": lambda: p.vocab_parallel_embedding(ids, weight, vocab_size=3 * world),
        "tokens": lambda: p.vocab_parallel_embedding(ids, weight, reduce_scatter_embeddings=True),
        "unused dim of a module": lambda: p.VocabParallelEmbedding(8, 4, sequence_dim=1),
        "unused dim": lambda: p.vocab_parallel_embedding(ids, weight, sequence_dim=1),
        "elements": lambda: p.split_tensor_into_1d_equal_chunks(torch.ones(2 * world + 1)),
        "module": lambda: p.sharded_state_dict({}),  # type: ignore[arg-type]
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


def more_refused(rank: int, world: int) -> list[str]:
    """A DTensor as weight, and a second derivative."""
    x, messages = torch.ones(3, 4).requires_grad_(), []
    split = distribute_tensor(torch.ones(2 * world, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
    y = parallel.column_parallel_linear(x, torch.ones(2, 4))
    for attempt in (
        lambda: parallel.column_parallel_linear(x, split),
        lambda: torch.autograd.grad(y.sum(), x, create_graph=True),
    ):
        try:
            attempt()
            messages.append("accepted")
        except NotImplementedError as error:
            messages.append(str(error))
    return messages


def alone(rank: int, world: int, seconds: float) -> str:
    """Rank 0's layer is wrong; the others wait for the group's timeout and are told so."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    x, weight = torch.ones(2, 4), torch.ones(2, 5 if rank == 0 else 4)
    try:
        parallel.column_parallel_linear(x, weight, sequence_parallel=True, group=group)
        message = "returned"
    except (ValueError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    dist.barrier()
    return message

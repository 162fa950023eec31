"""What the ranks run for the tensor-parallel MLP in use: its module, checkpoints, engines, wrong calls. See tests/ranks.py."""

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shared_specs import SpecError, Tiling, UnsupportedError
from tests.loss.ranks_torch_loss import distance, draw
from tests.mlp.ranks_torch_engines import full
from tests.mlp.ranks_torch_tensor_mlp import FEATURES, HIDDEN, PLACEMENTS, call, operands, part_of, untiled
from tiled_torch import TiledMLP
from tiled_torch.parallel import TensorParallelTiledMLP, sharded_state_dict, tensor_parallel_mlp


def module(
    rank: int,
    world: int,
    gated: bool,
    bias: bool,
    sequence_parallel: bool,
    fused: bool = False,
    main_grad: bool = False,
) -> dict[str, Any]:
    """The module's parameters are slices of `TiledMLP`'s from the same seed, and so are its results.

    Its activation is given as a layer.

    main_grad: every parameter has one, of ones, that takes its gradient.
    """
    torch.manual_seed(3)
    options: dict[str, Any] = {"gated": gated, "bias": bias, "fused_gate_up": fused, "dtype": torch.float64}
    whole = TiledMLP(HIDDEN, FEATURES, num_shards=3, **options)
    torch.manual_seed(3)
    options |= {"sequence_parallel": sequence_parallel, "activation": nn.SiLU()}
    mine = TensorParallelTiledMLP(HIDDEN, FEATURES, num_shards=3, **options)
    x, upstream = draw(2, 8 * world, HIDDEN, seed=0), draw(2, 8 * world, HIDDEN, seed=1)
    rows = slice(8 * rank, 8 * (rank + 1)) if sequence_parallel else slice(None)
    expected = whole(x)
    expected.backward(upstream)
    for parameter in mine.parameters() if main_grad else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(parameter), False  # type: ignore[attr-defined]
    y = mine(x[:, rows])
    y.backward(upstream[:, rows])
    taken = all(parameter.grad_added_to_main_grad for parameter in mine.parameters()) if main_grad else True  # type: ignore[attr-defined]
    errors = {"y": distance(y, expected[:, rows])}
    same = []
    for name, parameter in mine.named_parameters():
        theirs = whole.get_parameter(name)
        same.append(torch.equal(parameter, own_part(name, theirs, rank, world)))
        found = parameter.main_grad - 1 if main_grad else parameter.grad  # type: ignore[attr-defined]
        errors[f"d{name}"] = distance(found, own_part(name, theirs.grad, rank, world))  # type: ignore[arg-type]
    dims = {name: parameter.partition_dim for name, parameter in mine.named_parameters()}  # type: ignore[attr-defined]
    return {"errors": errors, "same": all(same) and taken, "dims": dims, "repr": mine.extra_repr()}


def own_part(name: str, whole: Any, rank: int, world: int) -> Tensor:
    """This rank's rows of gate before those of up, where they are fused."""
    if name.endswith("gate_up"):
        return torch.cat([part_of("w_up", half, rank, world) for half in whole.chunk(2)])
    return part_of(name, whole, rank, world)


def seeded(seed: int, gated: bool, bias: bool, fused: bool = False, **options: Any) -> TensorParallelTiledMLP:
    torch.manual_seed(seed)
    kind: dict[str, Any] = {"gated": gated, "bias": bias, "fused_gate_up": fused, "dtype": torch.float64}
    return TensorParallelTiledMLP(HIDDEN, FEATURES, **kind, **options)


def save(rank: int, world: int, folder: str, **kind: bool) -> dict[str, Any]:
    """A sharded checkpoint of the module of seed 3: its names, and the shapes of what is whole and of what this rank has."""
    state = sharded_state_dict(nn.ModuleDict({"mlp": seeded(3, **kind)}))
    dcp.save(state, checkpoint_id=folder)
    return {
        name: [list(value.shape), list(getattr(value, "chunks", [[None, value]])[0][1].shape)]
        for name, value in state.items()
    }


def load(rank: int, world: int, folder: str, **kind: bool) -> list[bool]:
    """Whether the module of another seed holds that of seed 3 afterwards; and whether it did not before."""
    module, expected = seeded(4, **kind), seeded(3, **kind)
    before = [torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True)]
    dcp.load(sharded_state_dict(nn.ModuleDict({"mlp": module})), checkpoint_id=folder)
    after = [torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True)]
    return [all(after), not any(before)]


def copies(rank: int, world: int) -> dict[str, bool]:
    """A copy, a converted module and one made on the meta device know their group and their slices."""
    mesh = init_device_mesh("cpu", (world,))
    module = seeded(3, True, True, group=mesh)
    copied, converted = copy.deepcopy(module), copy.deepcopy(module).float().double()
    empty = seeded(0, True, True, group=mesh, device="meta").to_empty(device="cpu")
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride")
    x = draw(8, HIDDEN, seed=0)
    found = {}
    for name, other in {"copied": copied, "converted": converted, "meta": empty}.items():
        pairs = list(zip(module.parameters(), other.parameters(), strict=True))
        found[f"{name} marks"] = all(getattr(a, mark) == getattr(b, mark) for a, b in pairs for mark in marks)
        torch.manual_seed(3)
        other.reset_parameters()
        found[f"{name} values"] = all(torch.equal(a, b) for a, b in pairs)
        found[f"{name} y"] = torch.equal(other(x), module(x))
    return found


class Projections(nn.Module):
    """An MLP of nn.Linear layers that runs through `tensor_parallel_mlp`, as a parallelised model's would."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FEATURES, dtype=torch.float64) for _ in range(2))
        self.down = nn.Linear(FEATURES, HIDDEN, dtype=torch.float64)
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        weights = [layer.weight for layer in layers.values()]
        biases: Any = {name: layer.bias for name, layer in layers.items()}
        options: Any = {"sequence_parallel": self.sequence_parallel, "num_shards": 3}
        return tensor_parallel_mlp(x, *weights, biases=biases, **options)


def data_and_tensor(rank: int, world: int, kind: str, sequence_parallel: bool) -> dict[str, float]:
    """FSDP2 over one dim of a mesh and this MLP over the other, against the untiled MLP on the batch of all."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    batch, place, ranks = rank // (world // 2), rank % (world // 2), world // 2
    torch.manual_seed(3)
    plain = Projections(sequence_parallel)
    reference = {
        name.replace(".weight", "").replace(".bias", "_bias"): p.detach().clone()
        for name, p in plain.named_parameters()
    }
    given = {f"w_{name}": reference[name] for name in ("gate", "up", "down")}
    given |= {f"b_{name}": reference[f"{name}_bias"] for name in ("gate", "up", "down")}
    given = {name: a.requires_grad_() for name, a in given.items()}
    xs = [draw(12, HIDDEN, seed=10 + one) for one in range(2)]
    expected = [untiled({**given, "x": x}) for x in xs]
    torch.stack([(y**2).sum() for y in expected]).mean().backward()

    if kind == "dtensor":
        styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        engine: Any = parallelize_module(plain, mesh["tp"], styles)  # type: ignore[arg-type]
    else:
        engine = TensorParallelTiledMLP(
            HIDDEN, FEATURES, bias=True, sequence_parallel=sequence_parallel, num_shards=3, group=mesh["tp"],
            dtype=torch.float64,
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                parameter.copy_(part_of(name, given[name], place, ranks))
    fully_shard(engine, mesh=mesh["dp"])
    rows = slice(place * 12 // ranks, (place + 1) * 12 // ranks) if sequence_parallel else slice(None)
    y = engine(xs[batch][rows])
    (y**2).sum().backward()
    errors = {"y": distance(y.detach(), expected[batch][rows])}
    for name, parameter in engine.named_parameters():
        if kind == "dtensor":
            layer, which = name.split(".")
            name = f"{which[0]}_{layer}"
            errors[name] = distance(full(parameter.grad), given[name].grad)
        else:
            errors[name] = distance(full(parameter.grad), part_of(name, given[name].grad, place, ranks))
    return errors


def refused(rank: int, world: int, what: str) -> str:
    """The message that this rank gets for a wrong call."""
    given: dict[str, Any] = {
        n: part_of(n, a, rank, world) if n != "x" else a for n, a in operands(8, gated=True, bias=True).items()
    }
    options: dict[str, Any] = {"sequence_parallel": True}
    mesh = init_device_mesh("cpu", (world,))
    match what:
        case "sequence_parallel":
            options = {"sequence_parallel": 1}
        case "split_sizes alone":
            options = {"split_sizes": (8, 8)}
        case "split_sizes kind":
            options["split_sizes"] = 8
        case "split_sizes length":
            options["split_sizes"] = (8, 8, 8)
        case "split_sizes of another":
            options["split_sizes"] = (7,) * world
        case "negative split_sizes":
            options["split_sizes"] = (-8, 8)
        case "x":
            given["x"] = distribute_tensor(given["x"], mesh, [Shard(0)])
        case "one DTensor":
            given["w_up"] = distribute_tensor(operands(8, gated=True, bias=True)["w_up"], mesh, [Shard(0)])
        case "placement":
            given = {
                n: a if n == "x" else distribute_tensor(a, mesh, [Shard(0)])
                for n, a in operands(8, gated=True, bias=False).items()
            }
        case "group beside a DTensor":
            given = {
                n: a if n == "x" else distribute_tensor(a, mesh, [Shard(PLACEMENTS[n])])
                for n, a in operands(8, gated=True, bias=False).items()
            }
            options["group"] = mesh
        case "mesh":
            options["group"] = init_device_mesh("cpu", (1, world))
        case "group":
            options["group"] = "tp"
        case "whole w_down":
            given["w_down"] = operands(8, gated=True, bias=True)["w_down"]
        case "num_shards":
            options["num_shards"] = 0
        case "deterministic":
            options["tiling"] = Tiling(deterministic=True)
        case "budget":
            options["tiling"] = Tiling(memory_budget=10)
        case "module":
            return message_of(lambda: TensorParallelTiledMLP(HIDDEN, 15))
        case "activation":
            return message_of(lambda: TensorParallelTiledMLP(HIDDEN, FEATURES, activation=nn.PReLU()))
        case "grad" | "vjp" | "vmap":
            return message_of(lambda: transformed(what, lambda x: call({**given, "x": x}, **options), given["x"]))
        case "no bias beside DTensors":
            given = {
                n: a if n == "x" else distribute_tensor(a, mesh, [Shard(PLACEMENTS[n])])
                for n, a in operands(8, gated=True, bias=False).items()
            } | {"b_up": None}
            options = {}
        case "create_graph":
            given["x"].requires_grad_()
            y = call(given, **options)
            return message_of(lambda: torch.autograd.grad(y.sum(), given["x"], create_graph=True))
    return message_of(lambda: call(given, **options))


def transformed(what: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    match what:
        case "grad":
            return torch.func.grad(lambda x: fn(x).sum())(x)
        case "vjp":
            return torch.func.vjp(fn, x)
    return torch.func.vmap(fn)(x[None])


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except (SpecError, TypeError, UnsupportedError) as error:
        return str(error)
    return "accepted"


def absent(rank: int, world: int, sequence_parallel: bool) -> str:
    """After a good call rank 1 makes a wrong one and never comes; the others' wait ends with the group's timeout."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))
    given = {n: part_of(n, a, rank, world) if n != "x" else a for n, a in operands(8, gated=True, bias=True).items()}
    call(given, sequence_parallel=sequence_parallel, group=group)
    if rank == 1:
        given["w_up"] = given["w_up"].T
    try:
        call(given, sequence_parallel=sequence_parallel, group=group)
    except (SpecError, RuntimeError) as error:
        return str(error)
    return "accepted"


def compiled(rank: int, world: int) -> dict[str, Any]:
    """Inside torch.compile the call runs as it is, outside of the graph."""
    given = operands(8, gated=True, bias=False)
    mine = {
        n: (a[rank * 8 // world : (rank + 1) * 8 // world] if n == "x" else part_of(n, a, rank, world))
        for n, a in given.items()
    }
    mine = {n: a.clone().requires_grad_() for n, a in mine.items()}

    def run(scale: float) -> Tensor:
        return call({**mine, "x": mine["x"] * scale}, sequence_parallel=True, num_shards=2)

    plain = run(2.0)
    expected = torch.autograd.grad(plain, list(mine.values()), torch.ones_like(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo asks tensors that are no leaves for .grad
        y = torch.compile(run, backend="eager")(2.0)
    found = torch.autograd.grad(y, list(mine.values()), torch.ones_like(y))
    return {"same": torch.equal(y, plain) and all(map(torch.equal, found, expected))}

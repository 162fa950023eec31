"""What the ranks run for tiled linear layers under fully_shard: gradients, gathered bytes, checkpoints. See tests/ranks.py."""

import copy
import tempfile
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from examples.sliced_mlp import SlicedMLP
from tests.core.torch_counting import LiveBytes
from tests.loss.ranks_torch_loss import distance
from tests.mlp.ranks_torch_engines import Collectives, full
from tiled_torch import TiledLinear, TiledLinearReturnBias
from tiled_torch.parallel import whole_state_dict

HIDDEN, OUT, TOKENS = 16, 32, 6


class Gathered(TorchDispatchMode):
    """Which units are gathered, and in how many bytes: their parameters, and the buffers that all-gathers write into.

    `peak` counts each gathered unit once; `buffers` counts every byte: for the time of a copy FSDP2 holds a unit twice.
    Rows that the ranks cannot share evenly are followed by others up to where they can, which `sizes` include.
    Units are gathered in order in forward and in reverse in backward.
    """

    def __init__(self, units: list[nn.Module]) -> None:
        super().__init__()
        self.units, self.order = units, [*range(len(units)), *reversed(range(len(units)))]
        ranks = dist.get_world_size()
        self.sizes = [
            sum(-(-p.shape[0] // ranks) * ranks * p.shape[1:].numel() * p.element_size() for p in unit.parameters())
            for unit in units
        ]
        self.flat: Counter[int] = Counter()
        self.gathers = self.peak = self.buffers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not what objects are gathered by, which torch 2.15 shows too.
        if func.__name__.startswith("_allgather_base_") and args[0].is_floating_point():
            storage, unit = args[0].untyped_storage(), self.order[self.gathers]
            self.gathers += 1
            self.flat[unit] += storage.nbytes()
            weakref.finalize(storage, self._gone, unit, storage.nbytes())
        out = func(*args, **(kwargs or {}))
        held = {i: self._parameters(unit) for i, unit in enumerate(self.units)}
        alive = [i for i in held if held[i] or self.flat[i]]
        self.peak = max(self.peak, sum(self.sizes[i] for i in alive))
        self.buffers = max(self.buffers, sum(held.values()) + self.flat.total())
        return out

    def _gone(self, unit: int, size: int) -> None:
        self.flat[unit] -= size

    @staticmethod
    def _parameters(unit: Any) -> int:
        group = unit._get_fsdp_state()._fsdp_param_group
        tensors = [t for p in (group.fsdp_params if group else ()) for t in p.all_gather_outputs]
        return sum(t.untyped_storage().nbytes() for t in tensors)


class Net(nn.Module):
    """A linear layer, the tiled one, and a linear layer, from one seed."""

    def __init__(self, grid: tuple[int, int] | None, dtype: torch.dtype, return_bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64).to(dtype)
        middle = nn.Linear(HIDDEN, OUT, dtype=torch.float64).to(dtype)
        self.last = nn.Linear(OUT, HIDDEN, dtype=torch.float64).to(dtype)
        kind = TiledLinearReturnBias if return_bias else TiledLinear
        self.middle = middle if grid is None else kind.from_linear(middle, in_splits=grid[0], out_splits=grid[1])

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.first(x)
        y = checkpoint(self.middle, x, use_reentrant=False) if checkpointed else self.middle(x)
        return self.last(y[0] + y[1] if isinstance(y, tuple) else y)


def tiles_of(layer: TiledLinear) -> list[nn.Module]:
    return [layer.linears[j][i] for j, i, *_ in layer.grid()]


def mesh_of(group: str, rank: int, world: int) -> tuple[DeviceMesh | None, int, int]:
    """(mesh, rank in it, its size): of all ranks, of two that lie side by side with two others, or of ranks 1 and 3."""
    match group:
        case "world":
            return init_device_mesh("cpu", (world,)), rank, world
        case "mesh dim":
            return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("other", "shard"))["shard"], rank % 2, 2
        case _:
            mesh = DeviceMesh("cpu", [1, 3])
            return (mesh, rank // 2, 2) if rank in (1, 3) else (None, rank, 2)


def sharded(grid: tuple[int, int] | None, mesh: DeviceMesh | int, return_bias: bool = False, **options: Any) -> Net:
    """Every tile, then the model, as FSDP2 units over a mesh, or all of so many ranks."""
    model = Net(grid, options.pop("dtype", torch.float64), return_bias)
    mesh = init_device_mesh("cpu", (mesh,)) if isinstance(mesh, int) else mesh
    for unit in (model.first, *(tiles_of(model.middle) if grid else [model.middle]), model.last):
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank: int, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64).to(
        dtype
    )


def truth(world: int) -> Net:
    """One untiled process over all ranks' data, with FSDP's mean over ranks."""
    model = Net(None, torch.float64)
    for rank in range(world):
        (model(batch(rank)).square().sum() / world).backward()
    return model


def whole_gradients(layer: Any, grid: tuple[int, int]) -> dict[str, Tensor]:
    """The gradients of the tiles as those of the whole layer."""
    weight = torch.full((OUT, HIDDEN), torch.nan, dtype=torch.float64)
    bias = torch.full((OUT,), torch.nan, dtype=torch.float64)
    for j, i, rows, columns in layer.grid():
        tile_ = layer.linears[j][i]
        weight[rows, columns] = full(tile_.weight.grad)
        if i == grid[0] - 1:
            bias[rows] = full(tile_.bias.grad)
    return {"weight": weight, "bias": bias}


def fsdp(
    grid: list[int],
    rank: int,
    world: int,
    checkpointed: bool = False,
    return_bias: bool = False,
    group: str = "world",
) -> dict[str, Any] | None:
    """Errors of every gradient against one untiled process; None on a rank that is not in the group."""
    mesh, rank, world = mesh_of(group, rank, world)
    if mesh is None:
        return None
    model = sharded(tuple(grid), mesh, return_bias)  # type: ignore[arg-type]
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    model(batch(rank), checkpointed).square().sum().backward()
    expected = truth(world)
    found = {f"middle.{k}": v for k, v in whole_gradients(model.middle, tuple(grid)).items()}  # type: ignore[arg-type]
    found |= {n: full(p.grad) for n, p in model.named_parameters() if not n.startswith("middle")}  # type: ignore[misc]
    return {
        "errors": [distance(found[name], p.grad) for name, p in expected.named_parameters()],  # type: ignore[arg-type]
        "fired": sorted(fired) == sorted(name for name, _ in model.named_parameters()),
    }


def gathered(grid: list[int] | None, rank: int, world: int) -> dict[str, int]:
    """Peak bytes of gathered parameters of a layer alone, tiled or not, forward and backward."""
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, OUT, dtype=torch.float64)
    layer = linear if grid is None else TiledLinear.from_linear(linear, in_splits=grid[0], out_splits=grid[1])
    mesh = init_device_mesh("cpu", (world,))
    units = [layer] if grid is None else tiles_of(layer)  # type: ignore[arg-type]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    if grid is not None:
        fully_shard(layer, mesh=mesh)
    with Gathered(units) as meter:
        layer(batch(rank).requires_grad_()).square().sum().backward()
    return {
        "peak": meter.peak,
        "buffers": meter.buffers,
        "gathers": meter.gathers,
        "units": len(units),
        "one": max(meter.sizes),
        "two": sum(sorted(meter.sizes)[-2:]),
        "copying": sum(sorted(meter.sizes)[-2:]) + max(meter.sizes),
        "layer": 8 * (HIDDEN * OUT + OUT),
    }


def mixed_precision(grid: list[int], rank: int, world: int) -> dict[str, list[float]]:
    """Errors of gradients in float64 under a bfloat16 policy, of the tiled and of the untiled layer."""
    errors = {}
    expected = truth(world)
    for name, kind in (("tiled", tuple(grid)), ("untiled", None)):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(kind, world, dtype=torch.float32, mp_policy=policy)  # type: ignore[arg-type]
        model(batch(rank, torch.float32)).square().sum().backward()
        middle = model.middle
        gradients = (
            whole_gradients(middle, kind)  # type: ignore[arg-type]
            if kind
            else {n: full(p.grad).double() for n, p in middle.named_parameters()}  # type: ignore[union-attr]
        )
        first = full(model.first.weight.grad)
        truths = [expected.first.weight.grad, expected.middle.weight.grad, expected.middle.bias.grad]
        found = [first.double(), gradients["weight"], gradients["bias"]]  # type: ignore[union-attr]
        errors[name] = [distance(a, b) for a, b in zip(found, truths, strict=True)]  # type: ignore[arg-type]
    return errors


def checkpoints(saved: list[int] | None, loaded: list[int] | None, rank: int, world: int) -> dict[str, Any]:
    """A model and its Adam state, saved with one grid and loaded with another (None: a plain layer), all sharded."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    models = [sharded(grid and tuple(grid), world) for grid in (saved, loaded)]  # type: ignore[arg-type, misc]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for model, optimizer, seed in zip(models, optimizers, (0, 7), strict=True):
        model(batch(rank + seed)).square().sum().backward()
        optimizer.step()
    states = [
        {"model": whole_state_dict(model), "exp_avg": whole_state_dict(model, moments(model, optimizer))}
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    with Gathered([]) as meter:
        dcp.save(states[0], checkpoint_id=folder[0])
        dcp.load(states[1], checkpoint_id=folder[0])
    wholes = [[weight_of(model.middle), moment_of(model, opt)] for model, opt in zip(models, optimizers, strict=True)]
    rest = [{n: full(p) for n, p in model.named_parameters() if "middle" not in n} for model in models]
    return {
        "equal": [torch.equal(a, b) for a, b in zip(*wholes, strict=True)],
        "rest": all(torch.equal(rest[0][n], rest[1][n]) for n in rest[0]),  # type: ignore[arg-type]
        "keys": sorted(states[0]["model"]),
        "gathers": meter.gathers,
    }


def save(rank: int, world: int, folder: str, grid: list[int]) -> None:
    """The model of seed 0 as its gradients have moved it, saved from this number of ranks."""
    dcp.save(whole_state_dict(moved(sharded(tuple(grid), world))), checkpoint_id=folder)  # type: ignore[arg-type]


def load(rank: int, world: int, folder: str, grid: list[int] | None) -> list[bool]:
    """Whether another model holds afterwards, on this number of ranks, what was saved, and whether it did not before."""
    expected, model = moved(Net(None, torch.float64)), sharded(grid and tuple(grid), world)  # type: ignore[arg-type]
    before = torch.equal(weight_of(model.middle), weight_of(expected.middle))
    dcp.load(whole_state_dict(model), checkpoint_id=folder)
    pairs = [(full(model.get_parameter(n)), p) for n, p in expected.named_parameters() if "middle" not in n]
    pairs.append((weight_of(model.middle), weight_of(expected.middle)))
    return [all(torch.equal(a, b) for a, b in pairs), not before]  # type: ignore[arg-type]


def moved(model: Net) -> Net:
    """Parameters that initialisation does not give, the same for every tiling and every number of ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def copied(rank: int, world: int, grid: list[int], source: str) -> dict[str, Any]:
    """copy_params_from into sharded tiles: of a plain layer, or of one that is sharded itself."""
    torch.manual_seed(5)
    plain = nn.Linear(HIDDEN, OUT, dtype=torch.float64)
    expected = weight_of(plain)
    mesh = init_device_mesh("cpu", (world,))
    layer: Any = TiledLinear(HIDDEN, OUT, in_splits=grid[0], out_splits=grid[1], dtype=torch.float64)
    for unit in (*tiles_of(layer), layer):
        fully_shard(unit, mesh=mesh)
    if source == "sharded":
        fully_shard(plain, mesh=mesh)
    with Collectives() as collectives:
        layer.copy_params_from(plain)
    x = batch(rank)
    kinds = {type(parameter).__name__ for parameter in layer.parameters()}
    return {
        "equal": torch.equal(weight_of(layer), expected),
        "y": distance(layer(x).detach(), nn.functional.linear(x, *unpacked(expected)).detach()),
        "kinds": sorted(kinds),
        "collectives": dict(collectives.counts),
    }


def unpacked(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: OUT * HIDDEN].view(OUT, HIDDEN), flat[OUT * HIDDEN :]


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


def weight_of(layer: Any) -> Tensor:
    """[weight; bias] of a layer, whole."""
    layer = layer.to_linear() if isinstance(layer, TiledLinear) else layer
    return torch.cat([full(layer.weight).flatten(), full(layer.bias)]).detach()  # type: ignore[union-attr, arg-type, list-item]


def moment_of(model: Net, optimizer: torch.optim.Optimizer) -> Tensor:
    """The first moments of the middle layer's weight, whole."""
    found = moments(model, optimizer)
    if isinstance(model.middle, nn.Linear):
        return full(found["middle.weight"])  # type: ignore[return-value]
    whole = torch.full((OUT, HIDDEN), torch.nan, dtype=torch.float64)
    for j, i, rows, columns in model.middle.grid():
        whole[rows, columns] = full(found[f"middle.linears.{j}.{i}.weight"])
    return whole


def mlp(rank: int, world: int, slices: int = 4, num_shards: int = 12, dtype: str = "float64") -> dict[str, Any]:
    """Sequence shards composed with weight tiles: every slice a unit of fully_shard, and tiled over the tokens."""
    torch.manual_seed(0)
    intermediate, tokens, kind = 128, 96, getattr(torch, dtype)
    model = SlicedMLP(HIDDEN, intermediate, slices=slices, num_shards=num_shards, dtype=kind)
    truth, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    found = []
    for whole in (truth, plain):
        inputs = [batch(r, kind, tokens).to(whole.slices[0].up.weight.dtype).requires_grad_() for r in range(world)]  # type: ignore[union-attr, arg-type]
        for x in inputs:
            (untiled(whole, x).square().sum() / world).backward()
        found.append(inputs[rank].grad * world)  # type: ignore[operator]
    mesh = init_device_mesh("cpu", (world,))
    units = list(model.slices)
    for unit in units:
        fully_shard(unit, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    x = batch(rank, kind, tokens).requires_grad_()
    with Gathered(units) as meter, LiveBytes() as live:
        model(x).square().sum().backward()
    others = [dict(whole.named_parameters()) for whole in (truth, plain)]
    pairs = [(full(p.grad), others[0][n].grad, others[1][n].grad) for n, p in model.named_parameters()]
    pairs.append((x.grad, *found))
    return {
        "errors": [distance(ours.double(), exact) for ours, exact, _ in pairs],  # type: ignore[union-attr, arg-type]
        "plain": [distance(theirs.double(), exact) for _, exact, theirs in pairs],  # type: ignore[union-attr, arg-type]
        "peak": meter.peak,
        "two": sum(sorted(meter.sizes)[-2:]),
        "largest": live.largest,
        "x": 8 * tokens * HIDDEN,
        "gathers": [meter.gathers, len(units)],
    }


def untiled(mlp: SlicedMLP, x: Tensor) -> Tensor:
    """One process with whole weights."""
    gate, up = (torch.cat([getattr(part, name).weight for part in mlp.slices]) for name in ("gate", "up"))
    down = torch.cat([part.down.weight for part in mlp.slices], 1)  # type: ignore[union-attr]
    return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

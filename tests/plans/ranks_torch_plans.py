"""What the ranks run for `parallelize`: losses and gradients of whole models against one process. See tests/ranks.py."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from examples.gated_linear_attention import GatedLinearModel
from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel
from tests.models.torch_decoders import BATCH, batch, decoder, loss_of, truth
from tiled_torch import TiledLinearCrossEntropy, TiledMLP
from tiled_torch.models import tile_model, tiling_paths
from tiled_torch.parallel import (
    ColumnParallelLinear,
    Plan,
    RowParallelLinear,
    apply_checkpointing,
    materialize,
    parallelize,
    register_plan,
)

FULL = Checkpointing()
EXACT: dict[str, Any] = {"reduce_dtype": None}
SHARDED = DataParallel(**EXACT)
BOTH_AXES = DataParallel(replicate_axis="dp_replicate", **EXACT)
TENSOR, WHOLE_TOKENS = TensorParallel(), TensorParallel(sequence_parallel=False)
GATHERED_LOGITS = TensorParallel(loss_parallel=False)

# name -> (axes that take two ranks or all there are, configuration)
CONFIGS: dict[str, tuple[tuple[str, ...], ParallelConfig]] = {
    "tp": (("tp",), ParallelConfig(tensor=WHOLE_TOKENS)),
    "sp": (("tp",), ParallelConfig(tensor=TENSOR)),
    "sp, gathered logits": (("tp",), ParallelConfig(tensor=GATHERED_LOGITS)),
    "sp, full": (("tp",), ParallelConfig(tensor=TENSOR, checkpointing=FULL)),
    "sp, offload": (("tp",), ParallelConfig(tensor=TENSOR, checkpointing=Checkpointing(offload=True))),
    "sp, products": (("tp",), ParallelConfig(tensor=TENSOR, checkpointing=Checkpointing(mode="products"))),
    "sp, op": (("tp",), ParallelConfig(tensor=TENSOR, checkpointing=Checkpointing(mode="op"))),
    "fsdp": (("dp_shard",), ParallelConfig(data=SHARDED)),
    "fsdp, inputs offloaded": (
        ("dp_shard",),
        ParallelConfig(data=SHARDED, checkpointing=Checkpointing(offload=True)),
    ),
    "fsdp, layers": (("dp_shard",), ParallelConfig(data=SHARDED, checkpointing=Checkpointing(mode="layers", every=2))),
    "fsdp, always": (("dp_shard",), ParallelConfig(data=DataParallel(reshard="always", **EXACT), checkpointing=FULL)),
    "fsdp, pipeline": (("dp_shard",), ParallelConfig(data=DataParallel(pipeline=True, **EXACT))),
    "fsdp, offload": (("dp_shard",), ParallelConfig(data=DataParallel(cpu_offload=True, **EXACT))),
    "fsdp, products": (("dp_shard",), ParallelConfig(data=SHARDED, checkpointing=Checkpointing(mode="products"))),
    "ddp": (("dp_shard",), ParallelConfig(data=DataParallel(engine="ddp", **EXACT), checkpointing=FULL)),
    "hsdp": (("dp_replicate", "dp_shard"), ParallelConfig(data=BOTH_AXES)),
    "fsdp x sp": (("dp_shard", "tp"), ParallelConfig(tensor=TENSOR, data=SHARDED, checkpointing=FULL)),
    "fsdp x sp, gathered logits": (("dp_shard", "tp"), ParallelConfig(tensor=GATHERED_LOGITS, data=SHARDED)),
    "fsdp x tp": (("dp_shard", "tp"), ParallelConfig(tensor=WHOLE_TOKENS, data=SHARDED)),
}  # fmt: skip


_MESHES: dict[Any, dict[tuple[str, ...], DeviceMesh]] = {}


def mesh_of(axes: tuple[str, ...], world: int) -> DeviceMesh:
    """All ranks on one axis, or two on the last of two axes.

    A call makes all its meshes at once, in one order: DTensor caches by what a mesh looks like, and what it remembers from
    the call before names process groups that have to exist in this one under the same names.
    """
    group = dist.group.WORLD
    if group not in _MESHES:
        _MESHES.clear()
        wanted = sorted({axes for axes, *_ in (*CONFIGS.values(), *REFUSED.values()) if axes})
        shapes = {axes: (world,) if len(axes) == 1 else (world // 2, 2) for axes in wanted}
        _MESHES[group] = {axes: init_device_mesh("cpu", s, mesh_dim_names=axes) for axes, s in shapes.items()}
    return _MESHES[group][axes]


def full(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _is_partial(gradient: Any) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def error_between(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> float:
    """The largest relative L2 distance; infinite where a gradient is missing, added or not finite."""
    present = {name: grad for name, grad in found.items() if grad is not None}
    if set(present) != set(expected) or not all(bool(g.isfinite().all()) for g in present.values()):
        return float("inf")
    return max(float((present[name] - grad).norm() / grad.norm()) for name, grad in expected.items())


def rows_of(mesh: DeviceMesh, config: ParallelConfig) -> slice:
    """This rank's part of the batch: the ranks of all axes but the tensor-parallel one split it."""
    parts, part = 1, 0
    for name in mesh.mesh_dim_names or ():
        if config.tensor is None or name != config.tensor.axis:
            parts, part = parts * mesh[name].size(), part * mesh[name].size() + mesh[name].get_local_rank()
    return slice(part * BATCH // parts, (part + 1) * BATCH // parts)


def compare(mesh: DeviceMesh, config: ParallelConfig, tiled: bool | str, kind: str, length: int, **changes: Any) -> Any:
    """Errors of the loss and of all gradients."""
    expected_loss, expected = truth(kind, length, **changes)
    model = decoder(kind, **changes)
    if tiled:
        tile_model(model, num_shards=3, scope=tiled if isinstance(tiled, str) else "mlp")  # type: ignore[arg-type]
    model = parallelize(model, mesh, config)
    rows = rows_of(mesh, config)
    ids, labels = batch(length)
    inside = tiled or (config.tensor is not None and config.tensor.loss_parallel)
    # Compiled layers are called without the cache that transformers fills by default: it breaks their graphs.
    loss = loss_of(model, ids[rows], labels[rows], inside, cache=None if config.compile is None else False)
    loss.backward()
    found = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    mean = loss.detach().clone()
    for group in mesh.get_all_groups():
        dist.all_reduce(mean, group=group)
    mean /= mesh.size()
    return {
        "loss": abs(mean.item() - expected_loss) / expected_loss,
        "gradients": error_between(found, expected),
        "partial": any(_is_partial(p.grad) for p in model.parameters()),
        "paths": sorted(set(tiling_paths(model).values())),
    }


def models(
    rank: int,
    world: int,
    names: list[str],
    tiled: bool | str = False,
    kind: str = "llama",
    length: int = 10,
    **changes: Any,
) -> dict[str, Any]:
    """`compare` of several configurations, by name."""
    found = {}
    for name in names:
        axes, config = CONFIGS[name]
        found[name] = compare(mesh_of(axes, world), config, tiled, kind, length, **changes)
    return found


def on_a_subset(rank: int, world: int, names: list[str], tiled: bool = False) -> dict[str, Any] | None:
    """`compare` over a mesh of ranks 1 and 3; the others help to make the meshes, get None and never hear of the model.

    Both meshes at once, for the reason that `mesh_of` gives.
    """
    meshes = {axis: DeviceMesh("cpu", [1, 3], mesh_dim_names=(axis,)) for axis in ("dp_shard", "tp")}
    if rank not in (1, 3):
        return None
    found = {}
    for name in names:
        (axis,), config = CONFIGS[name]
        found[name] = compare(meshes[axis], config, tiled, "llama", 10)
    return found


def filled(model: Any) -> Any:
    """The same model in float64 with values that are the same for the same shapes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def linear_attention(rank: int, world: int, names: list[str], length: int = 10) -> dict[str, Any]:
    """A model with a plan of the user's, against one process."""
    expected_model = filled(GatedLinearModel())
    ids, _ = batch(length)
    expected_loss = expected_model(ids[:, :-1], ids[:, 1:])
    expected_loss.backward()
    expected = {name: p.grad for name, p in expected_model.named_parameters()}
    found = {}
    for name in names:
        axes, config = CONFIGS[name]
        mesh = mesh_of(axes, world)
        model: Any = parallelize(filled(GatedLinearModel()), mesh, config)
        rows = ids[rows_of(mesh, config)]
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        grads = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        error = abs(mean.item() / world - expected_loss.item()) / expected_loss.item()
        partial_ones = any(_is_partial(p.grad) for p in model.parameters())
        found[name] = {"loss": error, "gradients": error_between(grads, expected), "partial": partial_ones}
    return found


def own_modules(rank: int, world: int) -> dict[str, float]:
    """A TiledMLP and a TiledLinearCrossEntropy that are the whole model."""
    found = {}
    x = torch.randn(2, 2 * world, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.randint(0, 11, (2, 2 * world), generator=torch.Generator().manual_seed(2))
    for name, sequence in (("tp", False), ("sp", True)):
        config = ParallelConfig(tensor=TensorParallel(sequence_parallel=sequence), checkpointing=FULL)
        plain = filled(TiledMLP(8, 12, bias=True, num_shards=3))
        plain(x).square().sum().backward()
        split: Any = parallelize(filled(TiledMLP(8, 12, bias=True, num_shards=3)), mesh_of(("tp",), world), config)
        mine = x.chunk(world, 1)[rank] if sequence else x
        split(mine).square().sum().backward()
        grads = {key: full(p.grad) for key, p in split.named_parameters()}
        found[f"mlp {name}"] = error_between(grads, {key: p.grad for key, p in plain.named_parameters()})
    head = filled(TiledLinearCrossEntropy(8, 11, bias=True, num_shards=2))
    head(x, targets).backward()
    split = parallelize(
        filled(TiledLinearCrossEntropy(8, 11, bias=True, num_shards=2)), mesh_of(("tp",), world), config
    )
    split(x, targets).backward()
    for name, own in (("loss", split), ("weighted loss", head)):
        if name == "weighted loss":  # the gradients of the first are there already: both are of one more call
            weights = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).view(targets.shape)
            split(x, targets, token_weight=weights).backward()
            own(x, targets, token_weight=weights).backward()
        grads = {key: full(p.grad) for key, p in split.named_parameters()}
        found[name] = error_between(grads, {key: p.grad for key, p in head.named_parameters()})
    return found


def meta(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """Models that get memory after they were split: with given weights the truth's loss, with drawn ones one process's."""
    expected_loss, _ = truth("llama")
    weights = dict(decoder().named_parameters())
    with torch.device("meta"):
        alone = decoder()
    drawn = {key: p.detach() for key, p in materialize(alone, seed=4).named_parameters()}
    found = {}
    for name in names:
        axes, config = CONFIGS[name]
        mesh, losses = mesh_of(axes, world), []
        for given in (weights, None):
            with torch.device("meta"):
                model = decoder()
            model = materialize(parallelize(model, mesh, config), weights=given, seed=4)
            ids, labels = batch()
            rows = rows_of(mesh, config)
            loss = loss_of(model, ids[rows], labels[rows], inside=config.tensor is not None).detach()
            dist.all_reduce(loss)
            losses.append(loss.item() / world)
        same = [bool(torch.equal(full(p.detach()), drawn[key])) for key, p in model.named_parameters()]
        found[name] = {"loss": abs(losses[0] - expected_loss) / expected_loss, "drawn": all(same), "other": losses[1]}
    return found


def compiled(
    rank: int, world: int, names: list[str], backend: str, ends: bool = True, tiled: bool = False, kind: str = "llama"
) -> dict[str, Any]:
    """The same numbers through torch.compile of each block and of the ends; how many graphs that were, of which functions."""
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(sorted({node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"}))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    whole = torch.compile
    torch.compile = partial(whole, backend=compiler)  # type: ignore[assignment]
    warnings.simplefilter("ignore")  # the compiler's own: deprecations, .grad of tensors that are no leaves
    try:
        found = {}
        for name in names:
            torch.compiler.reset()
            graphs.clear()
            axes, config = CONFIGS[name]
            config = replace(config, compile=Compile(ends=ends))
            errors = compare(mesh_of(axes, world), config, tiled, kind, 10, num_hidden_layers=2)
            found[name] = errors | {"graphs": len(graphs), "functions": graphs.copy()}
        return found
    finally:
        torch.compile = whole
        warnings.simplefilter("error")


class Rows(torch.nn.Module):
    """A layer of parallel layers of ours, which reads the sum that it was given a part of."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "dtype": torch.float64}
        self.up, self.down = (
            ColumnParallelLinear(8, 12, **options),
            RowParallelLinear(12, 8, input_is_parallel=True, **options),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin()).sin()


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Rows() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReduceScatters(TorchDispatchMode):
    """How many there are, of DTensor and of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in operator.name()
        return operator(*args, **(kwargs or {}))


def reduce_scatters(rank: int, world: int, tiled: bool) -> dict[str, Any]:
    """Those of a decoder's backward, and of a stack of our own layers', by checkpointing mode."""
    register_plan(Layers, Plan(blocks="layers"), replace=True)
    modes = {"nothing": None, "full": FULL, "op": Checkpointing(mode="op")}
    ids, labels = batch()
    found: dict[str, Any] = {}
    for name, checkpointing in modes.items():
        model = tile_model(decoder(), num_shards=3) if tiled else decoder()
        model = parallelize(model, mesh_of(("tp",), world), ParallelConfig(tensor=TENSOR, checkpointing=checkpointing))
        loss = loss_of(model, ids, labels, inside=True)
        with ReduceScatters() as scattered:
            loss.backward()
        own = filled(Layers())
        if checkpointing is not None:
            apply_checkpointing(own, checkpointing, Plan(blocks="layers"))
        y = own(torch.arange(48, dtype=torch.float64).reshape(6, 8) / 48)
        with ReduceScatters() as of_own:
            y.sum().backward()
        grads = [p.grad for p in own.parameters()]
        found[name] = {"decoder": scattered.count, "own": of_own.count, "gradients": [g.tolist() for g in grads]}
    return found


def axes_of_two_models(rank: int, world: int) -> dict[str, bool]:
    """The meshes of the parameters of two models that were split over one mesh."""
    mesh = mesh_of(("dp_shard", "tp"), world)
    meshes: list[Any] = []
    for _ in range(2):
        model: Any = parallelize(decoder(), mesh, ParallelConfig(tensor=TENSOR, data=SHARDED))
        # Before fully_shard gathers it, a parameter lies on both axes; what it is gathered to lies on the tensor axis.
        meshes += [m._tensor_mesh for m in model.modules() if hasattr(m, "_tensor_mesh")]
    return {
        "one object": all(one is meshes[0] for one in meshes) and len(meshes) == 2,
        "of the axis": meshes[0].mesh_dim_names == ("tp",),
    }


REFUSED: dict[str, tuple[tuple[str, ...], ParallelConfig, dict[str, Any]]] = {
    "order of axes": (("dp_shard", "dp_replicate"), ParallelConfig(data=BOTH_AXES), {}),
    "missing axis": (("dp_shard",), ParallelConfig(tensor=TENSOR), {}),
    "unused axis": (("dp_shard", "tp"), ParallelConfig(tensor=TENSOR), {}),
    "async without compile": (("tp",), ParallelConfig(tensor=TensorParallel(asynchronous=True)), {}),
    "async without cuda": (("tp",), ParallelConfig(tensor=TensorParallel(asynchronous=True), compile=Compile()), {}),
    "ddp on two axes": (("dp_shard", "tp"), ParallelConfig(tensor=TENSOR, data=DataParallel(engine="ddp")), {}),
    "heads": (("tp",), ParallelConfig(tensor=TENSOR), {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "kv heads": (("tp",), ParallelConfig(tensor=TENSOR), {"num_key_value_heads": 1}),
    "intermediate": (("tp",), ParallelConfig(tensor=TENSOR), {"intermediate_size": 25}),
    "products compiled": (
        ("tp",),
        ParallelConfig(tensor=TENSOR, compile=Compile(), checkpointing=Checkpointing(mode="products")),
        {},
    ),
    "op compiled": (
        ("tp",),
        ParallelConfig(tensor=TENSOR, compile=Compile(), checkpointing=Checkpointing(mode="op")),
        {},
    ),
    "float8": (("dp_shard",), ParallelConfig(data=SHARDED, float8=True), {}),
    "compiled reductions": (
        ("dp_shard",),
        ParallelConfig(data=DataParallel(engine="ddp"), compile=Compile(compiled_autograd=True)),
        {},
    ),
    "tiled loss gathered": (("tp",), ParallelConfig(tensor=GATHERED_LOGITS), {"tiled": True}),
    "adapter": (("tp",), ParallelConfig(tensor=TENSOR), {"adapter": True}),
    "activation": (("tp",), ParallelConfig(tensor=TENSOR), {"tiled": True, "activation": True}),
    "embedding": (("tp",), ParallelConfig(tensor=TENSOR), {"max_norm": 1.0}),
    "fused": (("tp",), ParallelConfig(tensor=TENSOR), {"kind": "phi3"}),
    "no layers": (("dp_shard",), ParallelConfig(data=SHARDED, checkpointing=Checkpointing()), {"unknown": True}),
    "meta ddp": (("dp_shard",), ParallelConfig(data=DataParallel(engine="ddp")), {"meta": True}),
    "donate": (("dp_shard",), ParallelConfig(data=SHARDED, donate=False), {}),
    "offloaded products": ((), ParallelConfig(checkpointing=Checkpointing(mode="products", offload=True)), {}),
    "block, products": ((), ParallelConfig(checkpointing=Checkpointing(mode="products")), {"block": True}),
}


class Unknown(torch.nn.Module):
    """Whose layers are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


class Adapted(torch.nn.Linear):
    """More than a linear layer."""


def snapshot(model: torch.nn.Module) -> list[Any]:
    """All of a model that parallelize could touch: classes, parameters, hooks, attributes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found: list[Any] = []
    for module in model.modules():
        found.append(
            (type(module).__name__, id(type(module)), sorted(vars(module)), module._compiled_call_impl is None)
        )
        found.append([len(getattr(module, kind)) for kind in hooks])
        found.extend(
            (name, id(p), p.device.type, p.requires_grad) for name, p in module._parameters.items() if p is not None
        )
    return found


def refusals(rank: int, world: int) -> dict[str, Any]:
    """The message of every refused call, and whether the model is as it was."""
    found = {}
    for name, (axes, config, changes) in REFUSED.items():
        changes = dict(changes)
        flags = {
            flag: changes.pop(flag, False)
            for flag in ("tiled", "block", "adapter", "activation", "unknown", "meta", "max_norm")
        }
        with torch.device("meta" if flags["meta"] else "cpu"):
            model: Any = Unknown() if flags["unknown"] else decoder(**changes)
        if flags["tiled"] or flags["block"]:
            tile_model(model, scope="block" if flags["block"] else "mlp")
        if flags["adapter"]:
            model.model.layers[1].mlp.up_proj = Adapted(16, 24, bias=False)
        if flags["activation"]:
            model.model.layers[1].mlp.act_fn = torch.nn.Softplus()
        if flags["max_norm"]:
            model.model.embed_tokens.max_norm = flags["max_norm"]
        found[name] = _refusal(model, mesh_of(axes, world) if axes else None, config)
    again = parallelize(decoder(), mesh_of(("dp_shard",), world), ParallelConfig(data=SHARDED))
    found["again"] = _refusal(again, mesh_of(("dp_shard",), world), ParallelConfig(data=SHARDED))
    found["nameless mesh"] = _refusal(decoder(), init_device_mesh("cpu", (world,)), ParallelConfig(tensor=TENSOR))
    return found


def batches(rank: int, world: int) -> dict[str, Any]:
    """What the first step says to ranks of a tensor axis with other batches, and that the next ones compare nothing."""
    found: dict[str, Any] = {}
    for tiled in (False, True):
        model: Any = tile_model(decoder()) if tiled else decoder()
        parallelize(model, mesh_of(("tp",), world), ParallelConfig(tensor=WHOLE_TOKENS))
        ids, labels = batch(12)
        try:
            model(input_ids=ids.roll(rank // 2, 0), labels=labels)
        except ValueError as error:
            found[f"tiled {tiled}"] = str(error)
    model = parallelize(decoder(), mesh_of(("tp",), world), ParallelConfig(tensor=WHOLE_TOKENS))
    found["hooks"] = []
    for _ in range(2):
        found["hooks"].append(len(model._forward_pre_hooks))
        model(input_ids=ids, labels=labels)
    found["hooks"].append(len(model._forward_pre_hooks))
    return found


def _refusal(model: Any, mesh: Any, config: ParallelConfig) -> list[Any]:
    before = snapshot(model)
    try:
        parallelize(model, mesh, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        return [type(error).__name__, str(error), snapshot(model) == before]
    return ["nothing was refused", "", False]

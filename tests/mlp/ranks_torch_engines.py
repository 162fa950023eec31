"""What the ranks run: one function per engine, returning errors and counts as JSON. See tests/ranks.py."""

import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs import UnsupportedError
from tests.plans.ranks_torch_model import (
    MICRO_BATCHES,
    GatedMLP,
    LoRALinear,
    Model,
    batch,
    error_between,
    expected_gradients,
    freeze_input,
    loss_of,
    shards_of,
    untiled,
)
from tiled_torch import tile
from tiled_torch.tile.module import INNER


def count_hooks(model: nn.Module) -> Counter[int]:
    """How often each parameter's gradient was accumulated since now."""
    counts: Counter[int] = Counter()
    for i, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: counts.update([i]))
    return counts


def blocks_in_order(model: Model) -> list[int]:
    """The number of a block for every gradient of its MLP, as they are accumulated from now on."""
    order: list[int] = []
    for i, block in enumerate(model.blocks):
        for parameter in block.mlp.parameters():  # type: ignore[union-attr]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    return order


def spread(gradients: list[Tensor]) -> float:
    """How far this rank's gradients are from rank 0's; DDP must leave none."""
    mine = torch.cat([g.flatten() for g in gradients])
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).abs().max())


def ddp(
    kind: str, checkpointed: bool, rank: int, world: int, static_graph: bool = False, no_sync: bool = False
) -> dict[str, Any]:
    """DDP over two micro-batches, or over four iterations of a static graph."""
    model = Model(kind, shards_of(rank), checkpointed)
    counts = count_hooks(model)
    wrapped = DistributedDataParallel(model, static_graph=static_graph)
    errors, spreads, fired = [], [], []
    for _ in range(4 if static_graph else 1):
        model.zero_grad()
        counts.clear()
        # Under static_graph DDP reduces once per iteration of one forward and backward, so there is one micro-batch.
        micro_batches = 1 if static_graph else MICRO_BATCHES
        for micro in range(micro_batches):
            quiet = no_sync and micro < micro_batches - 1
            with wrapped.no_sync() if quiet else nullcontext():
                loss_of(wrapped(batch(rank, micro))).backward()
        found = {i: p.grad for i, p in enumerate(model.parameters())}
        errors.append(error_between(found, expected_gradients(kind, world, micro_batches)))
        spreads.append(spread([g for g in found.values() if g is not None]))
        fired.append(sorted(set(counts.values())))
    return {"errors": errors, "spreads": spreads, "fired": fired, "micro_batches": micro_batches}


def rank0_forward(kind: str, wrapped: bool, training: bool, rank: int, world: int) -> dict[str, Any]:
    """A forward that only rank 0 makes, as in evaluation: it must return although rank 1 never comes."""
    model = Model(kind, shards_of(rank))
    engine = DistributedDataParallel(model) if wrapped else model
    if rank > 0:
        time.sleep(0.3)
        return {"errors": [0.0]}
    engine.train(training)
    with torch.no_grad():
        return {"errors": [distance(engine(batch(0, 0)), untiled(kind)(batch(0, 0)))]}


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; 0 between tensors without elements."""
    return float((found - expected).detach().norm() / expected.detach().norm()) if expected.numel() else 0.0


def fsdp1(kind: str, checkpointed: bool, wrapped: str, use_orig_params: bool, rank: int, world: int) -> dict[str, Any]:
    """FSDP1 around every block or every MLP, and around the model."""
    model: Any = Model(kind, shards_of(rank), checkpointed)
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    for i, block in enumerate(model.blocks):
        if wrapped == "mlp":
            block.mlp = FullyShardedDataParallel(block.mlp, **options)
        else:
            model.blocks[i] = FullyShardedDataParallel(block, **options)
    engine = FullyShardedDataParallel(model, **options)
    with FullyShardedDataParallel.summon_full_params(engine):
        before = [p.detach().clone() for p in engine.parameters()]
    for micro in range(MICRO_BATCHES):
        loss_of(engine(batch(rank, micro))).backward()
    # A step of length one is the gradient; summon_full_params shows gradients of original parameters only.
    torch.optim.SGD(engine.parameters(), lr=1.0).step()
    with FullyShardedDataParallel.summon_full_params(engine):
        found: dict[int, Tensor | None] = {
            i: old - new.detach() for i, (old, new) in enumerate(zip(before, engine.parameters(), strict=True))
        }
    return {"errors": [error_between(found, expected_gradients(kind, world))]}


def units_of(mlp: Any, wrapped: str) -> list[Any]:
    """The modules of an MLP that become units of their own, a list where several become one."""
    inner = mlp.get_submodule(INNER) if INNER in dict(mlp.named_children()) else getattr(mlp, "inner", mlp)
    linears = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    adapters = [module for module in mlp.modules() if isinstance(module, LoRALinear)]
    units = {"block": [], "mlp": [mlp], "inner": [inner], "linear": linears, "adapter": adapters}
    return [[inner.gate, inner.up]] if wrapped == "group" else units[wrapped]


def shard_fully(model: Model, wrapped: str, **options: Any) -> None:
    """fully_shard on the units of every MLP, on every block and on the model."""
    for block in model.blocks:
        for unit in units_of(block.mlp, wrapped):
            fully_shard(unit, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)


class Collectives(TorchDispatchMode):
    """Counts collectives by name; the numbers by which ranks compare what they are about to send, only where asked to."""

    def __init__(self, *, comparisons: bool = False) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.comparisons = comparisons

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and (self.comparisons or not compares(func, args)):
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def compares(func: Any, args: Any) -> bool:
    """Whether a collective is one of `tiled_torch.collectives.consistency`: of one number a rank."""
    return func.__name__.startswith("_allgather_base_") and args[1].dtype == torch.int64 and args[1].dim() == 1


def full(tensor: Any) -> Tensor | None:
    return None if tensor is None else tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def fsdp2(kind: str, checkpointed: bool, wrapped: str, rank: int, world: int, case: str = "plain") -> dict[str, Any]:
    """fully_shard at several depths; collectives are counted over forward and backward."""
    model = Model(kind, shards_of(rank), checkpointed)
    if case == "frozen_input":
        freeze_input(model)
    shard_fully(model, wrapped, mesh=init_device_mesh("cpu", (world,)))
    counts, order = count_hooks(model), blocks_in_order(model)
    with Collectives() as collectives:
        for micro in range(MICRO_BATCHES):
            loss_of(model(batch(rank, micro, case))).backward()
    found = {i: full(p.grad) for i, p in enumerate(model.parameters())}
    with torch.no_grad():  # evaluation: the same collectives on every rank
        y = model(batch(rank, 0, case))
    expected = expected_gradients(kind, world, case=case)
    return {
        "errors": [error_between(found, expected), distance(y, untiled(kind)(batch(rank, 0, case)))],
        "fired": sorted(set(counts.values())),
        "collectives": dict(sorted(collectives.counts.items())),
        "order": order[len(order) // 2 :],
    }


def fsdp2_mixed(kind: str, wrapped: str, rank: int, world: int) -> dict[str, float]:
    """Errors of the untiled and of the tiled model in float64 under a policy that computes in float32."""
    errors = {}
    for name in ("untiled", kind):
        model = Model(name, shards_of(rank))
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        shard_fully(model, wrapped, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        for micro in range(MICRO_BATCHES):
            loss_of(model(batch(rank, micro))).backward()
        found = {i: full(p.grad) for i, p in enumerate(model.parameters())}
        errors[name] = error_between(found, expected_gradients(kind, world))
    return errors


def tensor_parallel(checkpointed: bool, rank: int, world: int) -> dict[str, Any]:
    """Gate and up split by column, down by row; both ranks hold the same tokens."""
    model: Any = Model("tile", 3, checkpointed)
    reference = untiled("tile")
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.mlp.get_submodule(INNER), init_device_mesh("cpu", (world,)), plan)
    for micro in range(MICRO_BATCHES):
        loss_of(model(batch(0, micro))).backward()
        loss_of(reference(batch(0, micro))).backward()
    found = {i: full(p.grad) for i, p in enumerate(model.parameters())}
    expected = {i: p.grad for i, p in enumerate(reference.parameters()) if p.grad is not None}
    return {"errors": [error_between(found, expected)]}


def refused(engine: str, rank: int, world: int) -> str:
    """What tile says to an engine it cannot run once around the loop."""
    mlp, x = GatedMLP().double(), batch(0, 0)
    match engine:
        case "ddp":
            fn: Any = nn.Sequential(DistributedDataParallel(mlp))
        case "fsdp1":
            fn = nn.Sequential(FullyShardedDataParallel(mlp, device_id=torch.device("cpu")))
        case "fsdp2 in a closure":
            fully_shard(mlp, mesh=init_device_mesh("cpu", (world,)))
            fn = lambda x: mlp(x)  # noqa: E731
        case "fsdp2 in a list" | "fsdp2 in a list, training":
            held = [fully_shard(mlp, mesh=init_device_mesh("cpu", (world,)))]
            fn = lambda x: held[0](x)  # noqa: E731
        case _:
            fully_shard(mlp.gate, mesh=init_device_mesh("cpu", (world,)))
            fn = mlp.apart
    try:
        with torch.set_grad_enabled(engine.endswith("training")):
            tile(fn, num_shards=2)(x)
    except UnsupportedError as error:
        return str(error)
    return "accepted"

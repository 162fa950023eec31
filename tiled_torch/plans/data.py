"""Data parallelism of a finished model: `fully_shard` block by block, hybrid over two axes, or DistributedDataParallel."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from shared_specs.config import DataParallel
from tiled_torch.linear.module import TiledLinear
from tiled_torch.plans.registry import Plan


def apply_data_parallel(model: nn.Module, mesh: DeviceMesh, data: DataParallel, plan: Plan) -> nn.Module:
    """Return the model, sharded in place, or inside DistributedDataParallel."""
    if data.engine == "ddp":
        return _replicated(model, mesh[data.shard_axis], data)
    sharding = sharding_mesh(mesh, data)
    options: dict[str, Any] = {
        "mesh": sharding,
        "mp_policy": MixedPrecisionPolicy(param_dtype=_dtype(data.param_dtype), reduce_dtype=_dtype(data.reduce_dtype)),
        "shard_placement_fn": partial(placement_of, ranks=sharding.size(-1)),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if data.cpu_offload
        else OffloadPolicy(),
    }
    own = options | {"mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}
    for modules, reshard, is_layer in units_of(model, data, plan):
        what: Any = modules if len(modules) > 1 else modules[0]
        fully_shard(what, reshard_after_forward=reshard, **(own if is_layer else options))
    cast_inputs(model, data, plan)
    return model


class Unit(NamedTuple):
    """Modules whose weights are gathered together, but for those of units inside of them.

    Attributes:
        reshard: whether they are freed after forward. is_layer: whether it is one of the plan's blocks.
    """

    modules: list[nn.Module]
    reshard: bool
    is_layer: bool = False


def units_of(model: nn.Module, data: DataParallel, plan: Plan) -> list[Unit]:
    """Return the units of `fully_shard`, each before those around it."""
    blocks = _layers_of(model, plan)
    together = {model.get_submodule(path) for path in sharing_layers(model, (*plan.towers, plan.blocks))}
    ends = [model.get_submodule(path) for path in plan.ends if plan.ends_apart]
    early, always = data.reshard != "never" and not data.pipeline, data.reshard == "always"
    resharded = zip(blocks, reshard_after_forward(data, len(blocks)), strict=True)
    return [
        # Units of their own, so that no layer in tiles is gathered whole.
        *(Unit([tile], early) for tile in _tiles_of(model)),
        *(Unit([block], reshard, is_layer=True) for block, reshard in resharded if block not in together),
        *(Unit([end], early) for end in ends[:1]),
        *(Unit(last, always) for last in [ends[1:]] if last),  # used last: backward would gather them again at once
        Unit([model], always),
    ]


def cast_inputs(model: nn.Module, data: DataParallel, plan: Plan) -> list[RemovableHandle]:
    """Let every layer take its inputs in the dtype of its products, before anything keeps them."""
    dtype = _dtype(data.param_dtype)
    if dtype is None:
        return []
    cast = partial(_cast, dtype=dtype)
    return [block.register_forward_pre_hook(cast, with_kwargs=True, prepend=True) for block in _layers_of(model, plan)]


def _layers_of(model: nn.Module, plan: Plan) -> list[nn.Module]:
    return [block for block in plan.blocks_of(model) if block is not model]


def sharing_layers(model: nn.Module, lists: Sequence[str]) -> frozenset[str]:
    """Return the paths of the layers in these lists that share a parameter with another module: no unit of their own, they are
    gathered with all that is in none, for the whole step. lists: paths."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((f"{path}." for path in lists if path and name.startswith(f"{path}.")), None)
        owner = "" if inside is None else inside + name[len(inside) :].partition(".")[0]
        owners.setdefault(id(parameter), set()).add(owner)
    return frozenset(owner for found in owners.values() if len(found) > 1 for owner in found if owner)


def _cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a block's inputs in the dtype of its products, but for rotary positions, which some models make in float32.

    `fully_shard` would round them, and anew for every block, each of which keeps what it was given until its backward.
    """
    others = {name: given for name, given in kwargs.items() if name != "position_embeddings"}
    args, others = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, others))
    return args, kwargs | others


def placement_of(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Return the dim along which a parameter is cut; None where it is the first.

    Weights of experts, [E, ., .], are cut along the next one where that gives equal parts and the first does not: of 8 experts
    on 32 ranks 8 would have one each, and the others nothing.
    """
    uneven = parameter.dim() > 2 and parameter.shape[0] % ranks != 0
    return Shard(1) if uneven and parameter.shape[1] % ranks == 0 else None


def _tiles_of(model: nn.Module) -> list[nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, TiledLinear)]
    return [layer.linears[out_id][in_id] for layer in layers for out_id, in_id, *_ in layer.grid()]  # type: ignore[index]


def reshard_after_forward(data: DataParallel, blocks: int) -> list[bool]:
    """Return whether each block's gathered weights are freed after its forward."""
    if data.reshard != "default":
        return [data.reshard == "always"] * blocks
    # A pipeline runs every block once for each micro-batch; the last block is the first that backward needs.
    return [not data.pipeline and number < blocks - 1 for number in range(blocks)]


def sharding_mesh(mesh: DeviceMesh, data: DataParallel) -> DeviceMesh:
    """Return the axes weights are sharded over, flattened to one, behind the axis of replicas where there is one."""
    if data.context_axis is None:
        names = (data.shard_axis,) if data.replicate_axis is None else (data.replicate_axis, data.shard_axis)
        return mesh[names]
    axes = (data.shard_axis, *data.context_axes)
    name = "_".join(axes)
    flat = mesh[axes]._flatten(name)
    if data.replicate_axis is None:
        return flat
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh[data.replicate_axis], flat])
    return mesh[data.replicate_axis, name]  # before 2.12


def _replicated(model: nn.Module, mesh: DeviceMesh, data: DataParallel) -> nn.Module:
    engine = DistributedDataParallel(model, process_group=mesh.get_group())
    dtype = _dtype(data.reduce_dtype)
    if dtype is not None and any(p.requires_grad and p.dtype != dtype for p in model.parameters()):
        engine.register_comm_hook((mesh.get_group(), dtype), _reduce_in)
    return engine


def _reduce_in(
    state: Any,
    bucket: torch.distributed.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> Future[Tensor]:
    """Return the mean of a bucket of gradients over the replicas, computed in another dtype than theirs.

    Once a model of this process was parallelized with compiled autograd, DDP gives (gradient, parameter) instead, one by
    one, and looks at no result.
    """
    group, dtype = state
    replicas = torch.distributed.get_world_size(group)
    if isinstance(bucket, tuple):
        gradient, _ = bucket
        gradient.copy_(functional.all_reduce(gradient.to(dtype) / replicas, "sum", group))
        return None  # type: ignore[return-value]
    gradients = bucket.buffer()
    wide = gradients.to(dtype).div_(replicas)
    work: Any = torch.distributed.all_reduce(wide, group=group, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

"""State of models with layers that are split over ranks, in a form that loads at another number of ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import fail_type
from tiled_torch.parallel.groups import process_group
from tiled_torch.parallel.layers import Partition, _ParallelLayer

_NAME = "sharded_state_dict"


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """Names and tensors for torch.distributed.checkpoint: DTensors where a layer holds a part, the rest as it is.

    The tensors are the module's own memory, so that `dcp.load(sharded_state_dict(model), ...)` fills the model and
    `dcp.save(sharded_state_dict(model), ...)` writes it; the number of ranks may differ between the two. A fused weight
    (options.stride) has one entry for each of its parts, `name.0`, `name.1`, ...; padding of a vocabulary has none.

    Args:
        module: a model or a layer; its `state_dict()` remains this rank's parts.
    Returns:
        A flat mapping with the names of `state_dict()`.
    Raises:
        TypeError: no module. UnsupportedError: no process group has been initialised.
    """
    if not isinstance(module, nn.Module):
        fail_type(_NAME, "module", "a torch.nn.Module", type(module).__name__)
    found = dict(module.state_dict())
    for prefix, layer in module.named_modules():
        if isinstance(layer, _ParallelLayer):
            for name, partition in layer.partitions.items():
                path = f"{prefix}.{name}" if prefix else name
                del found[path]
                found |= _parts(path, getattr(layer, name).detach(), partition, layer)
    return found


def _parts(path: str, mine: Tensor, partition: Partition, layer: _ParallelLayer) -> dict[str, Tensor]:
    if partition.stride == 1:
        return {path: _as_dtensor(mine, partition, layer)}
    part = Partition(partition.dim, 1, partition.size // partition.stride)
    pieces = mine.chunk(partition.stride, partition.dim)
    return {f"{path}.{index}": _as_dtensor(piece, part, layer) for index, piece in enumerate(pieces)}


def _as_dtensor(mine: Tensor, partition: Partition, layer: _ParallelLayer) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    dim = partition.dim
    shape = list(mine.shape)
    start = layer.rank * shape[dim]
    mine = mine.narrow(dim, 0, max(0, min(shape[dim], partition.size - start)))
    shape[dim] = partition.size
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        mine, _mesh(layer, mine.device.type), [Shard(dim)], shape=whole.shape, stride=whole.stride()
    )


def _mesh(layer: _ParallelLayer, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(layer.group, DeviceMesh):
        return layer.group
    group = process_group(_NAME, layer.group)
    return DeviceMesh.from_group(group or torch.distributed.group.WORLD, device)

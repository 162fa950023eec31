"""State of models with layers that are split over ranks, in a form that loads at another number of ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shared_specs.errors import fail_type
from tiled_torch.collectives.split_module import ParallelLayer, Partition
from tiled_torch.core.tensors import is_dtensor
from tiled_torch.linear.state import WholeTensor

_NAME = "sharded_state_dict"


def sharded_state_dict(module: nn.Module, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return names and tensors for torch.distributed.checkpoint, where each layer's part has its place in the whole tensor.

    The tensors share the module's memory. So `dcp.load(sharded_state_dict(model), ...)` fills the model and
    `dcp.save(sharded_state_dict(model), ...)` writes it; nothing is gathered or copied. The number of ranks may differ between
    save and load, and so may further sharding of the parts (`fully_shard`). Names and shapes are those of the model with plain
    layers: a fused weight (options.stride) is in its own order, and a vocabulary has no padding.

    Args:
        module: a model or a layer; its `state_dict()` still has this rank's parts.
        tensors: the tensors to return, by the names of the module's parameters, such as the optimizer's exp_avg of every
            parameter. None: `module.state_dict()`.
    Returns:
        The tensors under their names; each part is replaced by a `WholeTensor`.
    Raises:
        TypeError: not a module.
    """
    if not isinstance(module, nn.Module):
        fail_type(_NAME, "module", "a torch.nn.Module", type(module).__name__)
    # By identity: a wrapper may keep its own prefix out of the names of its state.
    state = dict(module.state_dict(keep_vars=True))
    split: dict[int, tuple[ParallelLayer, Partition]] = {}
    for layer in module.modules():
        if isinstance(layer, ParallelLayer):
            for name, partition in layer.partitions.items():
                split[id(layer.get_parameter(name))] = (layer, partition)
    if tensors is not None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        places = {name: split[id(one)] for name, one in parameters.items() if id(one) in split}
        state = dict(tensors)
    else:
        places = {name: split[id(one)] for name, one in state.items() if id(one) in split}
    return {name: _presented(one, places.get(name)) for name, one in state.items()}


def _presented(value: Any, place: tuple[ParallelLayer, Partition] | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if place is None:
        return value
    layer, partition = place
    whole = [partition.size if dim == partition.dim else size for dim, size in enumerate(value.shape)]
    pieces = list(_pieces(value, partition, layer.rank, layer.ranks))
    nothing = (_local(value)[0].narrow(partition.dim, 0, 0), (0,) * value.dim())
    return WholeTensor(tuple(whole), pieces or [nothing])


def _pieces(part: Tensor, partition: Partition, rank: int, ranks: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield what this process holds of a rank's part, and where that starts in the whole: a stretch of each of its runs."""
    dim, stride, size = partition
    local, first = _local(part)
    run, last = part.shape[dim] // stride, first[dim] + local.shape[dim]
    for number in range(stride):
        begins = number * (size // stride) + rank * run  # of this run, in the whole
        start, stop = max(first[dim], number * run), min(last, (number + 1) * run)
        stop = min(stop, number * run + size - begins)  # what lies beyond the whole is padding
        if start < stop:
            offset = list(first)
            offset[dim] = begins + start - number * run
            yield local.narrow(dim, start - first[dim], stop - start), tuple(offset)


def _local(part: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Return what this process holds of a rank's part, and where it starts there."""
    if not is_dtensor(part):
        return part, (0,) * part.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, first = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
    return part.to_local(), tuple(first)

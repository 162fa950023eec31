"""Checkpoints of tiled linear layers that do not depend on how they are tiled, without gathering anything.

Tiles of a layer, and each rank's part of a tile, are chunks of one whole weight. torch.distributed.checkpoint knows such
chunks and reads any of them from any others.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_specs.errors import fail_type
from tiled_torch.core.tensors import is_dtensor
from tiled_torch.linear.module import TiledLinear


def whole_state_dict(module: nn.Module, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a state dict in which each tiled linear layer has one `weight` and one `bias`, for torch.distributed.checkpoint.

    The keys and shapes are those of the model with plain linear layers, so that what one grid of tiles saves, another
    grid, another number of ranks or a plain layer loads. Nothing is gathered or copied: the values share the tiles' memory,
    and loading into them (`torch.distributed.checkpoint.load`) loads the tiles.

    Args:
        module: a model with any number of `TiledLinear`s, sharded (`fully_shard`) or not.
        tensors: what is presented, by the names of the module's parameters: a state of the optimizer such as exp_avg of
            every parameter; None is `module.state_dict()`.
    Returns:
        The tensors under their names; those of tiles replaced by a `WholeTensor` for every weight and bias.
    Raises:
        TypeError: module is no nn.Module.
    Source: derived in shared_specs/README.md.
    Example:
        >>> from tiled_torch import TiledLinear
        >>> model = torch.nn.Sequential(TiledLinear(8, 12, in_splits=2, out_splits=3))
        >>> {name: tuple(value.shape) for name, value in whole_state_dict(model).items()}
        {'0.weight': (12, 8), '0.bias': (12,)}
    """
    if not isinstance(module, nn.Module):
        fail_type("whole_state_dict", "module", "a module", type(module).__name__)
    state: dict[str, Any] = dict(module.state_dict() if tensors is None else tensors)
    for name, layer in module.named_modules():
        if isinstance(layer, TiledLinear):
            state |= _whole(layer, f"{name}." if name else "", state)
    return state


def _whole(layer: TiledLinear, prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    """Take the tiles' entries out of `state` and return the whole weight and bias that they are chunks of."""
    weights: list[tuple[Tensor, tuple[int, ...]]] = []
    biases: list[tuple[Tensor, tuple[int, ...]]] = []
    for out_id, in_id, rows, columns in layer.grid():
        tile = f"{prefix}linears.{out_id}.{in_id}."
        if f"{tile}weight" in state:
            weights.append((state.pop(f"{tile}weight"), (rows.start, columns.start)))
        if f"{tile}bias" in state:
            biases.append((state.pop(f"{tile}bias"), (rows.start,)))
    found = {}
    if weights:
        found[f"{prefix}weight"] = WholeTensor((layer.out_features, layer.in_features), weights)
    if biases:
        found[f"{prefix}bias"] = WholeTensor((layer.out_features,), biases)
    return found


class Chunk(NamedTuple):
    """Part of a whole: where it starts there, and its memory."""

    offset: tuple[int, ...]
    local: Tensor


class WholeTensor(Tensor):
    """A tensor that exists as chunks of other tensors only; a checkpoint reads and writes them where they are.

    Args:
        shape: of the whole. tiles: (tensor, offset within the whole); DTensors stand for this rank's part of them.
    """

    chunks: list[Chunk]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], tiles: list[tuple[Tensor, tuple[int, ...]]]) -> "WholeTensor":
        first = tiles[0][0]
        whole = Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)  # type: ignore[attr-defined]
        whole.chunks = [chunk for tensor, offset in tiles for chunk in _chunks(tensor, offset)]
        return whole

    def __init__(self, shape: tuple[int, ...], tiles: list[tuple[Tensor, tuple[int, ...]]]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"WholeTensor is for torch.distributed.checkpoint; {func} cannot compute with it.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"WholeTensor(shape={tuple(self.shape)}, chunks at {[chunk.offset for chunk in self.chunks]})"

    # The three methods by which torch.distributed.checkpoint asks a tensor for its chunks. It is loaded inside them: only
    # who saves or loads needs it, and it takes seconds.

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, metadata.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(metadata, TensorProperties.create_from_tensor(chunk.local), self.size()),
            )
            for metadata, chunk in zip(self.__create_chunk_list__(), self.chunks, strict=True)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(chunk.offset), chunk.local.shape) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(chunk.local for chunk in self.chunks if chunk.offset == tuple(index.offset))


def _chunks(tensor: Any, offset: tuple[int, ...]) -> list[Chunk]:
    """Return what this rank holds of a tile that starts at `offset`; nothing where its part is empty."""
    start, local = (0,) * tensor.dim(), tensor
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if tensor.device_mesh.get_coordinate() is None:
            return []
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
    if not math.prod(local.shape):
        return []
    return [Chunk(tuple(a + b for a, b in zip(offset, start, strict=True)), local.detach())]

"""What autograd saves of a layer's input waits in host memory until backward asks for it; all else stays where it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tiled_torch.core.tensors import is_dtensor
from tiled_torch.models.block.host_memory import host_memory


@contextmanager
def input_on_host(x: Any, takes: int = 1, inputs: int = 1) -> Iterator[None]:
    """Keep, inside this context, what autograd saves of the tensor x in host memory; all else stays where it is.

    Args:
        takes: how often backward asks for it: only then is the one that was put there before it copied ahead. inputs: how many
            layers of the model keep theirs so.
    Raises:
        UnsupportedError: so many do not fit; nothing was copied.
    Source: the role of `torch.autograd.graph.save_on_cpu`, whose copies of all that is saved run on the stream of the
        computation.
    """
    if not isinstance(x, Tensor) or not x.numel():
        yield
        return
    place = _place(x)

    def pack(saved: Tensor) -> Any:
        if _place(saved) != place:
            return saved
        waiting = host_memory(saved.device).put(_local(saved), takes, inputs)
        return waiting, _layout(saved)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        waiting, layout = kept
        return waiting.take() if layout is None else _distributed(waiting.take(), layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def asked_to_offload(layer: Any) -> bool:
    """Return whether the model's own checkpointing was asked to offload: activation_checkpointing_enable(offload=True)."""
    if not (getattr(layer, "gradient_checkpointing", False) and layer.training):
        return False
    run = getattr(getattr(layer, "_gradient_checkpointing_func", None), "func", None)
    return run is not None and run is not checkpoint


def _local(x: Any) -> Tensor:
    return x._local_tensor if is_dtensor(x) else x


def _place(x: Tensor) -> tuple[Any, ...]:
    local = _local(x)
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), type(x)


def _layout(x: Any) -> Any:
    """Return what a DTensor is made of besides its values; None for a plain tensor."""
    return (x.device_mesh, x.placements, x.shape, x.stride()) if is_dtensor(x) else None


def _distributed(local: Tensor, layout: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = layout
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

"""Meters for exact tests: FLOP of matrix products, live bytes of storages (those of `bench`), bytes handed to
save_for_backward."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tiled_torch.check.live_bytes import LiveBytes
from tiled_torch.core.tensors import is_dtensor

__all__ = ["FACTORS", "GemmFlop", "HeldBytes", "LiveBytes", "saved_bytes"]

# position of the two factors among the arguments
FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2)}
FACTORS["_grouped_mm"] = (0, 1)  # rows of all groups, [n, K], with a weight of each, [G, K, N]


class GemmFlop(TorchDispatchMode):
    """2 x multiply-adds of every matrix product, oneDNN's too; FlopCounterMode leaves `addmm_` out."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name == "_linear_pointwise":
            a, w = args[0], args[2 if func.__name__.endswith("binary") else 1]
            self.flop += 2 * a.numel() * w.shape[0]
        factors = FACTORS.get(name)
        if factors is not None:
            a, b = (args[place] for place in factors)
            self.flop += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


class HeldBytes(TorchDispatchMode):
    """The most bytes that storages have at a time, those of `known` among them, whatever size they are given later.

    `LiveBytes` counts a storage as it was made; `fully_shard` empties those of gathered weights and fills them again.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._live: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._see(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor) and not is_dtensor(tensor))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in [*self._live]))
        return out

    def _see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._live.setdefault(tensor.untyped_storage())


def saved_bytes(run: Callable[[], Any], exclude: list[Tensor]) -> tuple[Any, int]:
    """(result of run, bytes of the distinct storages it handed to save_for_backward, `exclude` left out)."""
    skip = {tensor.untyped_storage()._cdata for tensor in exclude}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in skip:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

"""Meters for exact tests: FLOP of matrix products, live bytes of storages, bytes handed to save_for_backward."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# position of the two factors among the arguments
FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2)}


class GemmFlop(TorchDispatchMode):
    """2 x multiply-adds of every matrix product; FlopCounterMode leaves `addmm_` out."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = FACTORS.get(func.__name__.split(".")[0])
        if factors is not None:
            a, b = (args[place] for place in factors)
            self.flop += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Bytes of storages created under the mode and still alive: now and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


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

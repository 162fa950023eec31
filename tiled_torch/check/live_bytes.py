"""The meter of memory: bytes of tensors, counted as they come and go, the same on every machine."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of storages created under the mode and still alive: now and at the peak.

    sizes: bytes of each storage, every number once. steps: operations that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = self.steps = 0
        self.sizes: set[int] = set()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._changes: list[tuple[int, int]] = []  # the number of a storage, and the bytes that it adds or takes away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.steps += 1
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._track(tensor.untyped_storage())
        return out

    def peak_above(self, results: Iterable[Tensor]) -> int:
        """Return the peak without the storages of `results`, whenever these came; they must still be alive."""
        left_out = {self._numbers.get(tensor.untyped_storage()) for tensor in results}
        now = peak = 0
        for number, size in self._changes:
            now += 0 if number in left_out else size
            peak = max(peak, now)
        return peak

    def _track(self, storage: Any) -> None:
        if storage in self._numbers:
            return
        number, size = len(self._changes), storage.nbytes()
        self._numbers[storage] = number
        self._change(number, size)
        self.largest = max(self.largest, size)
        self.sizes.add(size)
        weakref.finalize(storage, self._change, number, -size)

    def _change(self, number: int, size: int) -> None:
        self._changes.append((number, size))
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of what `run` makes, of a CPU counted, of a GPU asked of its allocator."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        run()
    return live.peak

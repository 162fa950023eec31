"""What measures and compares variants of PyTorch in a worker of `bench --device gpu`."""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared_specs.app.bench.bench import host_seconds
from shared_specs.app.gpu.worker import Variant

# Cycles that the device waits before a timed run, about a millisecond, so that the host's launches do not count.
_HEAD_START = 2_000_000
# Elements that a comparison widens at a time.
_BLOCK = 2**27
# A row whose norm is below this part of the average one's is measured against that part: its own digits have cancelled.
_SMALL_ROW = 1 / 64


class TorchDevice:
    """Seconds by device events on a GPU, by the host's clock elsewhere; and the device's peak bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, variant: Variant) -> float:
        if variant.before is not None:
            variant.before()
        if self.device.type != "cuda":
            return host_seconds(variant.run)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        first.record()
        variant.run()
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last) / 1e3

    def peak(self, variant: Variant) -> int | None:
        if variant.before is not None:
            variant.before()
        if self.device.type != "cuda":
            variant.run()
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what others left in pieces does not have to fit beside it
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        variant.run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def distances(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        if unknown := found.keys() - expected.keys():
            raise ValueError(f"nothing to compare {', '.join(sorted(unknown))} with")
        return {name: distance(found[name], expected[name]) for name in found}

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """torch.empty* returns NaN."""
        before = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)

    def healthy(self) -> bool:
        try:
            return torch.ones(1, device=self.device).add(1).item() == 2
        except Exception:  # whatever a broken context raises
            return False

    def forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the relative L2 distance of all elements, and of the worst row; NaN where something is not finite."""
    if found.shape != expected.shape:
        raise ValueError(f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    if not found.numel():
        return 0.0, 0.0
    ours, theirs = (a.detach().reshape(-1, a.shape[-1] if a.dim() > 1 else a.numel()) for a in (found, expected))
    rows = max(1, _BLOCK // ours.shape[1])
    off, norm = [], []
    for a, b in zip(ours.split(rows), theirs.split(rows), strict=True):
        wide = b.to(torch.float32) if b.dtype != torch.float64 else b
        off.append((a.to(wide.dtype) - wide).square_().sum(1, dtype=torch.float64))
        norm.append(wide.square().sum(1, dtype=torch.float64))
    d, n = torch.cat(off), torch.cat(norm)
    if not float(n.sum()):
        return (math.inf, math.inf) if float(d.sum()) else (0.0, 0.0)
    whole, worst = d.sum() / n.sum(), (d / n.clamp(min=float(n.mean()) * _SMALL_ROW**2)).max()
    return float(whole) ** 0.5, float(worst) ** 0.5


def described(device: torch.device) -> dict[str, Any]:
    """Return what a record says of the device."""
    if device.type != "cuda":
        return {"name": str(device)}
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "memory_bytes": found.total_memory, "processors": found.multi_processor_count}

"""Layers' inputs in host memory until backward asks for them: copied on a stream of their own, one layer ahead.

Where tensors live in host memory anyway the same path makes ordinary copies, so that it can be tested without a GPU.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiled_torch.core.tensors import is_dtensor


class HostMemory:
    """Pinned buffers of one device, used again from step to step, and what waits in them, in the order of forward.

    Attributes:
        bytes: of all buffers. At most what waited at the same time, plus what backward has let go of since.
    Memory: on the device two inputs while backward runs, the one in use and the one that comes next.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.get_device_module(device).Stream(device) if device.type != "cpu" else None
        self.pinned = device.type == "cuda"
        self.free: list[Tensor] = []
        self.bytes = 0
        self.last: weakref.ref[Waiting] | None = None

    def put(self, x: Tensor, takes: int = 1) -> "Waiting":
        """Return what stands for x, whose values are copied. takes: how often backward will ask for it."""
        with torch.no_grad():
            buffer = self._buffer(x)
            host = buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
            if self.stream is None:
                host.copy_(x)
            else:
                self.stream.wait_stream(torch.get_device_module(x.device).current_stream(x.device))
                with torch.get_device_module(x.device).stream(self.stream):
                    host.copy_(x, non_blocking=True)
                x.record_stream(self.stream)  # its memory is not given away before the copy is done
        waiting = Waiting(self, host, x.device, self.last, takes)
        weakref.finalize(waiting, self._let_go, buffer)
        self.last = weakref.ref(waiting)
        return waiting

    def _buffer(self, x: Tensor) -> Tensor:
        size = x.numel() * x.itemsize
        fitting = [buffer for buffer in self.free if buffer.numel() >= size]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self.free = [buffer for buffer in self.free if buffer is not best]
            return best
        # None fits: those of shorter contexts are let go before a longer one is made.
        self.bytes += size - sum(map(Tensor.numel, self.free))
        self.free.clear()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)

    def _let_go(self, buffer: Tensor) -> None:
        self.free.append(buffer)


class Waiting:
    """The values of one input in host memory."""

    def __init__(
        self,
        memory: HostMemory,
        host: Tensor,
        device: torch.device,
        before: "weakref.ref[Waiting] | None",
        takes: int,
    ) -> None:
        self.memory, self.host, self.device, self.before, self.takes = memory, host, device, before, takes
        self.coming: tuple[Tensor, Any] | None = None  # on the device, and the moment at which it is there

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.coming is not None:
            return
        stream = self.memory.stream
        if stream is None:
            self.coming = self.host.clone(), None
            return
        module = torch.get_device_module(self.device)
        with module.stream(stream):
            x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            x.copy_(self.host, non_blocking=True)
            self.coming = x, stream.record_event()

    def take(self) -> Tensor:
        """Return it on its device; the last time that it is asked for the one before it begins to come."""
        self.fetch()
        assert self.coming is not None
        (x, there), self.coming = self.coming, None
        if there is not None:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_event(there)
            x.record_stream(current)
        self.takes -= 1
        before = self.before() if self.before is not None else None
        if self.takes == 0 and before is not None:
            before.fetch()
        return x


@cache
def host_memory(device: torch.device) -> HostMemory:
    """Return the one of a device."""
    return HostMemory(device)


@contextmanager
def input_on_host(x: Any, takes: int = 1) -> Iterator[None]:
    """Keep, inside this context, what autograd saves of the tensor x in host memory; all else stays where it is.

    takes: how often backward asks for it: only then is the one that was put there before it copied ahead.
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
        waiting = host_memory(saved.device).put(_local(saved), takes)
        return waiting, _layout(saved)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        waiting, layout = kept
        return waiting.take() if layout is None else _distributed(waiting.take(), layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


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

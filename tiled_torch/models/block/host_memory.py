"""Buffers in host memory where layers' inputs wait, and their copies on a stream of their own, one layer ahead.

Where tensors live in host memory anyway the same path makes ordinary copies, so that it can be tested without a GPU.
"""

import warnings
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.layers.host_memory import check_host_memory, read_host_memory
from tiled_torch.tile.state import is_fake


class HostPiece(NamedTuple):
    """Bytes of one buffer: uint8 [size]; pinned: a GPU copies them beside its computation."""

    bytes: Tensor
    pinned: bool


class HostMemory:
    """Buffers of one device, pinned where they can be, used again from step to step, and what waits in them, in the order of
    forward.

    Attributes:
        bytes: of all buffers. At most what waited at the same time, plus what backward has let go of since.
    Memory: on the device two inputs while backward runs, the one in use and the one that comes next. Pinned memory is taken
        in powers of two, to which PyTorch rounds it, so that at most a sixteenth is taken in vain.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.get_device_module(device).Stream(device) if device.type != "cpu" else None
        self.pinned = device.type == "cuda"
        self.free: list[tuple[HostPiece, ...]] = []
        self.bytes = 0
        self.last: weakref.ref[Waiting] | None = None
        self._warned = False
        self._room_for = 0

    def put(self, x: Tensor, takes: int = 1, inputs: int = 1) -> "Waiting":
        """Return what stands for x, whose values are copied.

        Args:
            takes: how often backward will ask for it. inputs: how many such tensors will wait at the same time.
        Raises:
            UnsupportedError: there is not so much memory; nothing was copied.
        """
        buffer = self._buffer(x, inputs)
        with torch.no_grad():
            if self.stream is None:
                _copy(x, buffer, to_host=True)
            else:
                module = torch.get_device_module(x.device)
                self.stream.wait_stream(module.current_stream(x.device))
                with module.stream(self.stream):
                    _copy(x, buffer, to_host=True)
                x.record_stream(self.stream)  # its memory is not given away before the copy is done
        waiting = Waiting(self, buffer, x, self.last, takes)
        weakref.finalize(waiting, self.free.append, buffer)
        self.last = weakref.ref(waiting)
        return waiting

    def _buffer(self, x: Tensor, inputs: int) -> tuple[HostPiece, ...]:
        size = x.numel() * x.itemsize
        fitting = [buffer for buffer in self.free if _size(buffer) >= size]
        if fitting:
            best = min(fitting, key=_size)
            self.free[:] = [buffer for buffer in self.free if buffer is not best]
            return best
        # None fits: those of shorter contexts are let go before a longer one is made.
        self.bytes -= sum(map(_size, self.free))
        pinned = any(piece.pinned for buffer in self.free for piece in buffer)
        self.free.clear()
        if pinned:
            _give_back()
        if inputs * size > self._room_for and not is_fake(x):
            check_host_memory(inputs, size, had=self.bytes, machine=read_host_memory())
            self._room_for = inputs * size
        buffer = tuple(map(self._piece, powers_of_two(size) if self.pinned else [size]))
        self.bytes += size
        return buffer

    def _piece(self, size: int) -> HostPiece:
        if self.pinned:
            try:
                return HostPiece(torch.empty(size, dtype=torch.uint8, pin_memory=True), True)
            except RuntimeError as error:
                self._tell(size, str(error).partition("\n")[0])
        return HostPiece(torch.empty(size, dtype=torch.uint8), False)

    def _tell(self, size: int, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Checkpointing(offload=True): {size} bytes of host memory cannot be pinned ({reason}), so they are pageable "
                "and the computation waits for their copies. Leave more host memory free, or raise the limit of pinned memory.",
                stacklevel=2,
            )


class Waiting:
    """The values of one input in host memory."""

    def __init__(
        self,
        memory: HostMemory,
        buffer: tuple[HostPiece, ...],
        x: Tensor,
        before: "weakref.ref[Waiting] | None",
        takes: int,
    ) -> None:
        self.memory, self.buffer, self.before, self.takes = memory, buffer, before, takes
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.coming: tuple[Tensor, Any] | None = None  # on the device, and the moment at which it is there

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.coming is not None:
            return
        stream = self.memory.stream
        if stream is None:
            self.coming = self._copied(), None
            return
        with torch.get_device_module(self.device).stream(stream):
            self.coming = self._copied(), stream.record_event()

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

    def _copied(self) -> Tensor:
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        _copy(x, self.buffer, to_host=False)
        return x


@cache
def host_memory(device: torch.device) -> HostMemory:
    """Return the one of a device."""
    return HostMemory(device)


def powers_of_two(size: int) -> list[int]:
    """Return sizes that add up to `size`: powers of two, and a last one that may be up to a sixteenth of `size` below one."""
    sizes, left = [], size
    while left:
        above = 1 << (left - 1).bit_length()
        sizes.append(left if 16 * (above - left) <= size else above // 2)
        left -= sizes[-1]
    return sizes


def _size(buffer: tuple[HostPiece, ...]) -> int:
    return sum(piece.bytes.numel() for piece in buffer)


def _copy(x: Tensor, buffer: tuple[HostPiece, ...], *, to_host: bool) -> None:
    """Copy x into a buffer or out of it, on the current stream. The host waits for copies of pageable memory."""
    if len(buffer) == 1:
        ((memory, pinned),) = buffer
        pairs = [(x, memory[: x.numel() * x.itemsize].view(x.dtype).view(x.shape), pinned)]
    else:
        left, pairs = x.contiguous().view(-1).view(torch.uint8), []
        for memory, pinned in buffer:
            size = min(memory.numel(), left.numel())
            pairs.append((left[:size], memory[:size], pinned))
            left = left[size:]
    for here, there, pinned in pairs:
        to, of = (there, here) if to_host else (here, there)
        to.copy_(of, non_blocking=pinned)


def _give_back() -> None:
    """Give the allocator's unused pinned memory back, which it would keep for sizes that are not asked for again."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # not in every PyTorch
    if empty is not None:
        empty()

"""Streams that do not exist, and whether what runs on them could ever meet in the wrong order.

Operations inside `Streams` run at once, and are noted with the stream that they would be enqueued on. Two of them may come in
either order on a GPU unless the same stream, an event or a host that waits puts one before the other. Where they then touch
the same memory, and one of them writes it, that is a race. So one run tells of every order that streams and events allow.
The caching allocator is part of it: a block that is let go of is written again at once on the stream that it was made on,
behind what the streams that were recorded for it had to do by then. The host writes pageable memory that it has let go of.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]


def _behind(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()

    def wait_stream(self, other: "Stream") -> None:
        _behind(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _behind(self.clock, event.clock)

    def record_event(self) -> Event:
        return Event(dict(self.clock))


class Block:
    """Memory, who wrote it last and who has read it since: (stream, time)."""

    def __init__(self, storage: StorageWeakRef, name: str, made_on: Stream | None) -> None:
        self.storage, self.name, self.made_on = storage, name, made_on
        self.written: tuple[str, int] | None = None
        self.read: dict[str, int] = {}
        self.recorded: list[Stream] = []


class Streams(TorchDispatchMode):
    """Attributes: races: what could meet, in words. main: the stream of the computation."""

    def __init__(self, waits: bool = True, records: bool = True, events: bool = True) -> None:
        """False: what a wrong program leaves out: the wait for the computation, `record_stream`, the wait for a copy."""
        super().__init__()
        self.main, self.races = Stream("main"), list[str]()
        self._current, self._host, self._blocks = self.main, Clock(), dict[int, Block]()
        self._records = records
        self._patches = ExitStack()
        if not waits:
            self._patches.enter_context(patch.object(Stream, "wait_stream", lambda *_: None))
        if not events:
            self._patches.enter_context(patch.object(Stream, "wait_event", lambda *_: None))

    def __enter__(self) -> Self:
        self._patches.enter_context(patch.object(torch, "get_device_module", lambda _: self))
        self._patches.enter_context(
            patch.object(Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))
        )
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()
        self._let_go()

    def pageable(self, tensor: Tensor) -> None:
        """Say that it is no block of the caching allocator's, but memory that the host has again once it is let go of."""
        self._block(tensor).made_on = None

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._let_go()
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("empty"):
            self._block(result)
        elif not func.is_view:
            stream = self._current
            _behind(stream.clock, self._host)
            stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
            made = args[0] if func._schema.is_mutable else result
            written = [made] if isinstance(made, Tensor) else []
            for tensor in [a for a in args if isinstance(a, Tensor) and not any(a is w for w in written)]:
                self._reads(self._block(tensor), stream)
            for tensor in written:
                self._writes(self._block(tensor), stream, name)
            if name == "copy_" and not (len(args) > 2 and args[2]) and not (kwargs or {}).get("non_blocking"):
                _behind(self._host, stream.clock)  # the host waits
        return result

    def _block(self, tensor: Tensor) -> Block:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self._blocks:
            self._blocks[storage.cdata] = Block(storage, f"{[*tensor.shape]}", self._current)
        return self._blocks[storage.cdata]

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        if self._records:
            self._block(tensor).recorded.append(stream)

    def _reads(self, block: Block, stream: Stream) -> None:
        if block.written is not None:
            self._after(block, "read", stream, *block.written)
        block.read[stream.name] = stream.clock[stream.name]

    def _writes(self, block: Block, stream: Stream, what: str) -> None:
        for name, time in [*block.read.items(), *([block.written] if block.written else [])]:
            self._after(block, what, stream, name, time)
        block.written, block.read = (stream.name, stream.clock[stream.name]), {}

    def _after(self, block: Block, what: str, stream: Stream, name: str, time: int) -> None:
        if name != stream.name and stream.clock.get(name, 0) < time:
            self.races.append(f"{what} of {block.name} on {stream.name} beside an operation on {name}")

    def _let_go(self) -> None:
        """Blocks that nobody has any more are made anew: as written at once on their stream."""
        for key, block in [(key, block) for key, block in self._blocks.items() if block.storage.expired()]:
            del self._blocks[key]
            by = block.made_on or Stream("the host")
            again = Stream(by.name)
            again.clock = dict(by.clock)
            _behind(again.clock, self._host)
            for stream in block.recorded:
                _behind(again.clock, stream.clock)
            again.clock.setdefault(again.name, 0)
            self._writes(block, again, "a new tensor in the memory")

"""What a shard's recomputation must find as forward found it: random numbers, autocast, buffers, modes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from shared_specs.errors import UnsupportedError, error_text

RandomState = tuple[Tensor, ...]


class Streams(Protocol):
    """Streams of random numbers as they stood at one moment."""

    def restored(self) -> AbstractContextManager[None]:
        """Inside, they stand there again; afterwards as before."""
        ...


# () -> how they stand now, of every kind of streams that are kept apart from the generators; `parallel.random` adds its own.
STREAMS: list[Callable[[], Streams]] = []


@contextmanager
def restored(moments: Iterable[Streams]) -> Iterator[None]:
    with ExitStack() as stack:
        for moment in moments:
            stack.enter_context(moment.restored())
        yield


def random_state(device: torch.device) -> RandomState:
    """State of the CPU's generator and of the device's own."""
    cpu = torch.get_rng_state()
    if device.type in ("cpu", "meta"):
        return (cpu,)
    refuse_capture("recomputation")
    return cpu, torch.get_device_module(device).get_rng_state(device)


def refuse_capture(function: str) -> None:
    """UnsupportedError while a CUDA graph is captured: the generators' states, which a recomputation needs, cannot be read."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        advice = "It reads the states of the generators, which a capture does not allow: call it outside, or fn alone inside."
        raise UnsupportedError(
            error_text(function, "a call", "outside the capture of a CUDA graph", "one inside", advice=advice)
        )


def set_random_state(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """What runs inside draws numbers that the program outside never misses."""
    state = random_state(device)
    try:
        with restored([take() for take in STREAMS]):
            yield
    finally:
        set_random_state(device, state)


class RandomStates:
    """The generators' state, and named streams, at the start of every shard; one object where no shard draws a number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: list[RandomState] = []
        self.streams: list[list[Streams]] = []

    def record(self) -> None:
        state = random_state(self.device)
        if self.states and all(map(torch.equal, state, self.states[-1])):
            state = self.states[-1]
        self.states.append(state)
        self.streams.append([take() for take in STREAMS])

    @contextmanager
    def again(self, shard: int) -> Iterator[None]:
        """What runs inside draws the numbers that the shard drew."""
        set_random_state(self.device, self.states[shard])
        with restored(self.streams[shard]):
            yield


class Autocast:
    """The autocast state of a moment, for the device of x and for the CPU."""

    def __init__(self, device: torch.device) -> None:
        kinds = dict.fromkeys((device.type, "cpu"))
        self.modes = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self.cache = torch.is_autocast_cache_enabled()

    @property
    def enabled(self) -> bool:
        return any(enabled for _, enabled, _ in self.modes)

    @contextmanager
    def again(self) -> Iterator[None]:
        """That state, with a cache of its own.

        Weights cast for shards must be shared by shards only: a cast made without gradients would cut the graph of code
        outside that uses the same weight, and a cast made outside would hide the weight behind a tensor with a history.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self.modes:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            if self.enabled:
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            yield


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever runs inside leaves no trace in buffers, whether it writes to them or replaces them."""
    before = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    try:
        yield
    finally:
        for module, name, buffer, copy in before:
            # Always, because batch norm writes without a new version; through .data, because giving a buffer back what
            # it held is no change to those who saved it.
            buffer.data.copy_(copy)
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer


class Modes:
    """`training` of every module, so that a switch between forward and backward does not change what is recomputed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modes = [(module, module.training) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        later = [(module, module.training) for module, _ in self.modes]
        for module, training in self.modes:
            module.training = training
        try:
            yield
        finally:
            for module, training in later:
                module.training = training

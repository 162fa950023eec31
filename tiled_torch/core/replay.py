"""State that a shard's recomputation must find as forward found it: random numbers, autocast, cached parametrizations.

And what it need not compute.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from shared_specs.errors import UnsupportedError, refusal_text

RandomState = tuple[Tensor, ...]


class Streams(Protocol):
    """Streams of random numbers as they stood at one moment."""

    def restored(self) -> AbstractContextManager[None]:
        """Put this state back inside the context; the present state again afterwards."""
        ...


# One function for each kind of random streams besides the generators: () -> their present state. `layers.random` adds its own.
STREAMS: list[Callable[[], Streams]] = []


@contextmanager
def restored(moments: Iterable[Streams]) -> Iterator[None]:
    with ExitStack() as stack:
        for moment in moments:
            stack.enter_context(moment.restored())
        yield


def random_state(device: torch.device) -> RandomState:
    """Return the state of the CPU's generator and, on another device, of that device's."""
    cpu = torch.get_rng_state()
    if device.type in ("cpu", "meta"):
        return (cpu,)
    refuse_capture("recomputation")
    return cpu, torch.get_device_module(device).get_rng_state(device)


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(function: str) -> None:
    """UnsupportedError while a CUDA graph is captured: the generators' states, which a recomputation needs, cannot be read."""
    if is_capturing():
        advice = "It reads the states of the generators, which a capture does not allow: call it outside, or fn alone inside."
        raise UnsupportedError(refusal_text(function, "this call is inside the capture of a CUDA graph", advice=advice))


def refuse_transforms(function: str, untiled: str) -> None:
    """Raise UnsupportedError inside torch.func, whose tensors the hand-written nodes and products cannot take."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        advice = f"Differentiate {untiled} itself, or use tiled_jax."
        raise UnsupportedError(refusal_text(function, "this call is inside torch.func", advice=advice))


def set_random_state(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def random_state_kept(device: torch.device, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the random state back afterwards: the program outside goes on with its own numbers.

    generators: those besides the default ones.
    """
    state, own = random_state(device), _states(generators)
    try:
        with restored([take() for take in STREAMS]):
            yield
    finally:
        set_random_state(device, state)
        _set_states(generators, own)


def _states(generators: Sequence[torch.Generator]) -> RandomState:
    return tuple(generator.get_state() for generator in generators)


def _set_states(generators: Sequence[torch.Generator], states: RandomState) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class GeneratorStates:
    """The generators' states, and named streams, at the start of every shard; one object where no shard draws a number.

    generators: those that fn is known to use besides the default ones. apart: tensors are fake, no number is ever drawn.
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self.device, self.apart = device, apart
        self.generators: Sequence[torch.Generator] = ()
        self.states: list[tuple[RandomState, RandomState]] = []
        self.streams: list[list[Streams]] = []

    def record(self) -> None:
        if self.apart:
            return
        states = random_state(self.device), _states(self.generators)
        if self.states and all(all(map(torch.equal, *pair)) for pair in zip(states, self.states[-1], strict=True)):
            states = self.states[-1]
        self.states.append(states)
        self.streams.append([take() for take in STREAMS])

    @contextmanager
    def again(self, shard: int) -> Iterator[None]:
        """Draw, inside this context, the random numbers that the shard drew."""
        if self.apart:
            yield
            return
        state, own = self.states[shard]
        set_random_state(self.device, state)
        _set_states(self.generators, own)
        with restored(self.streams[shard]):
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the random state back afterwards: the program outside goes on with its own numbers."""
        if self.apart:
            yield
            return
        with random_state_kept(self.device, self.generators):
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
        """Set that state, with a cache of its own.

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


_UNREAD: ContextVar[frozenset[str]] = ContextVar("unread", default=frozenset())


@contextmanager
def results_unread(functions: Iterable[str]) -> Iterator[None]:
    """Compute no results of these functions inside, where only their gradients are wanted: they are zeros, which nobody may
    read."""
    token = _UNREAD.set(frozenset(functions))
    try:
        yield
    finally:
        _UNREAD.reset(token)


def is_unread(function: str) -> bool:
    """Return whether nobody reads what a function, by its name, returns here. A compiler sees none of this."""
    return not torch.compiler.is_compiling() and function in _UNREAD.get()


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Compute parametrized weights at every look, inside this context.

    What `parametrize.cached` keeps of a run without gradients would cut the graph of a later one.
    """
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = {}, 0
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = before


class ParametrizedCache:
    """The content of `torch.nn.utils.parametrize.cached` at a moment: weights computed outside fn."""

    def __init__(self) -> None:
        self.enabled = parametrize._cache_enabled
        self.entries: dict[Any, Any] = dict(parametrize._cache) if self.enabled else {}

    @contextmanager
    def again(self, overrides: Mapping[Any, Any] | None = None) -> Iterator[None]:
        """Set that content in a cache of its own: entries of one shard, or of a run without gradients, must not be shared."""
        if not self.enabled and not parametrize._cache_enabled:
            yield
            return
        before = parametrize._cache, parametrize._cache_enabled
        parametrize._cache, parametrize._cache_enabled = {**self.entries, **(overrides or {})}, self.enabled
        try:
            yield
        finally:
            parametrize._cache, parametrize._cache_enabled = before

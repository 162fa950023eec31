"""Collectives as linear maps: what moves forward, and the map that moves the gradient back, which is one of them again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.collectives.transport import Sizes


class KeptParts:
    """The results of the reduce-scatters of a recomputed region, in order, so that its replay sends nothing again.

    PyTorch's selective checkpoints keep what operators return; those of `torch.distributed` write over their arguments.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the results of the collectives that run inside this context."""

        def take(make: Callable[[], Tensor]) -> Tensor:
            part = make()
            self._parts.append(part.detach())  # the other one will have the graph behind it
            return part

        with _through(take):
            yield

    @contextmanager
    def given(self) -> Iterator[None]:
        """Return the kept results, inside this context, in place of new collectives. They are freed."""
        parts = iter(self._parts)
        self._parts = []
        with _through(lambda _: next(parts).detach()):
            yield


_keeping: ContextVar[Callable[[Callable[[], Tensor]], Tensor] | None] = ContextVar("_keeping", default=None)


@contextmanager
def _through(keep: Callable[[Callable[[], Tensor]], Tensor]) -> Iterator[None]:
    before = _keeping.set(keep)
    try:
        yield
    finally:
        _keeping.reset(before)


def _kept(make: Callable[[], Tensor]) -> Tensor:
    keep = _keeping.get()
    return make() if keep is None else keep(make)


class Movement(Protocol):
    """A map from what a rank gives to what it gets."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Keep:
    """Nothing moves."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return x.view_as(x)


@dataclass(frozen=True)
class Sum:
    """The sum of all ranks' x."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return transport.all_reduce(over, x).wait()


@dataclass(frozen=True)
class Split:
    """This rank's stretch of its own x, in memory of its own."""

    dim: int
    sizes: Sizes = None

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return own_part(over, x, self.dim, self.sizes).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Join:
    """All ranks' x side by side."""

    dim: int
    sizes: Sizes = None

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return transport.all_gather(over, x, self.dim, self.sizes).wait()


@dataclass(frozen=True)
class SumSplit:
    """This rank's stretch of the sum."""

    dim: int
    sizes: Sizes = None

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return _kept(lambda: transport.reduce_scatter(over, x, self.dim, self.sizes).wait())


@dataclass(frozen=True)
class Exchange:
    """Rows from every rank to every rank."""

    output_sizes: Sizes = None
    input_sizes: Sizes = None

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        return transport.all_to_all(over, x, self.output_sizes, self.input_sizes).wait()


@dataclass(frozen=True)
class ToHidden:
    """[T / R, ..., H] becomes [T, ..., H / R]: rank r is sent the r-th stretch of features of every token."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        cut = torch.cat(x.unflatten(-1, (over.size, x.shape[-1] // over.size)).unbind(-2))
        return transport.all_to_all(over, cut).wait()


@dataclass(frozen=True)
class ToSequence:
    """[T, ..., H / R] becomes [T / R, ..., H]: rank r is sent the r-th stretch of tokens, and lays features side by side."""

    def __call__(self, over: RankGroup, x: Tensor) -> Tensor:
        found = transport.all_to_all(over, x).wait()
        return torch.cat(found.unflatten(0, (over.size, x.shape[0] // over.size)).unbind(), -1)


def own_part(over: RankGroup, x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
    """Return a view of this rank's stretch of x."""
    if sizes is None:
        size = x.shape[dim] // over.size
        return x.narrow(dim, over.rank * size, size)
    return x.narrow(dim, sum(sizes[: over.rank]), sizes[over.rank])


class Move(torch.autograd.Function):
    """One movement forward and its conjugate backward. The backward is a Move too, so that it can be differentiated."""

    @staticmethod
    def forward(x: Tensor, over: RankGroup, there: Movement, back: Movement) -> Tensor:
        return there(over, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.over, ctx.there, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return move(dy, ctx.over, ctx.back, ctx.there), None, None, None


def move(x: Tensor, over: RankGroup, there: Movement, back: Movement) -> Tensor:
    """x moved `there`; its gradient comes `back`. x itself where there is nobody to move it to."""
    if not over.several:
        return x
    return Move.apply(x, over, there, back)

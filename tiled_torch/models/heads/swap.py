"""A head that is another class for as long as its model's forward runs, and itself again wherever it has to compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from tiled_torch.core.autocast import after_autocast, autocast_dtype
from tiled_torch.models.family import dtype_of_unit, is_unit


class SwappedHead:
    """Marker of a head inside its model's forward."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        run: Any = self._tiled_run
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and _fits(x, self):
            return run.take(x)
        with as_before(self):
            return self(*args, **kwargs)


def _fits(x: Tensor, head: Any) -> bool:
    """Whether the head's result has the dtype that its stand-in is going to have."""
    weight = next(head.parameters(), None)
    cast = autocast_dtype(x)
    found = after_autocast(x, cast)
    if is_unit(head):  # it casts what comes and goes
        return dtype_of_unit(head, head.weight.dtype if cast is None else found) == found
    return weight is None or found == after_autocast(weight, cast) or not weight.is_floating_point()


@cache
def _swapped(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (SwappedHead, kind), {"__module__": kind.__module__, "_kind": kind})


@contextmanager
def swapped(head: Any, run: Any) -> Iterator[None]:
    """Let every call of the head inside return what stands for its result."""
    kind = type(head)
    vars(head)["_tiled_run"] = run
    head.__class__ = _swapped(kind)
    try:
        yield
    finally:
        head.__class__ = kind
        vars(head).pop("_tiled_run", None)
        run.open = False


@contextmanager
def as_before(head: Any) -> Iterator[None]:
    """Inside, a head that is swapped is itself."""
    kind, run = type(head), vars(head).get("_tiled_run")
    if run is None:
        yield
        return
    head.__class__ = kind._kind
    del vars(head)["_tiled_run"]
    try:
        yield
    finally:
        head.__class__ = kind
        vars(head)["_tiled_run"] = run


def is_swapped(head: Any) -> bool:
    return isinstance(head, SwappedHead)

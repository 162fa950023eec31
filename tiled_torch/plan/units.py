"""The units of `fully_shard` without ranks: what one of them gathers and cuts is there as a tensor of as many bytes, as long.

So a step on the meta device, whose bytes are counted, has those of its weights and gradients as well. FSDP2's order: a unit's
weights come before its forward, the next unit's in backward while this one's are used, and its gradients are cut in
`reduce_dtype` when its backward is done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tiled_torch.plans.data import Unit

_SUM = 4  # bytes of a gradient that is being summed, by `DataParallel`


@dataclass
class _Gathering:
    """What the units of one step have in common."""

    ranks: int
    itemsize: int
    own: Mapping[int, int]
    order: list["_GatheredUnit"] = field(
        default_factory=list
    )  # forwards that have been, of which backward takes the last
    arrived: Tensor | None = None  # as the last unit's weights came, until those of the next one are there
    cut: Tensor | None = None  # the gradients of the unit before, while they are sent


@dataclass
class _GatheredUnit:
    """One unit. parameters: of no unit inside it. outermost: it is the model. kept: its parts of gradients."""

    parameters: tuple[nn.Parameter, ...]
    reshard: bool
    outermost: bool
    shared: _Gathering
    whole: Tensor | None = None
    coming: Tensor | None = None
    state: str = "idle"
    kept: list[Tensor] = field(default_factory=list)

    def gather(self) -> None:
        """Ask for the weights."""
        if self.whole is None and self.coming is None:
            size = sum(parameter.numel() for parameter in self.parameters) * self.shared.itemsize
            self.coming = _bytes(size if self.shared.ranks > 1 else 0)

    def wait(self) -> None:
        """Have the weights."""
        if self.coming is None:
            return
        if self.state == "forward":
            self.shared.arrived = None
        self.whole = _bytes(sum(parameter.numel() for parameter in self.parameters) * self.shared.itemsize)
        self.shared.arrived, self.coming = (self.coming if self.state == "forward" else None), None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Begin a forward, or inside of backward one that is computed again."""
        if self.state == "backward":
            self.gather()
            self.wait()
            return args, kwargs
        first, self.state = self.state != "forward", "forward"
        self.gather()
        self.wait()
        done = partial(_Before.apply, self.reduce)
        return tree_map_only(Tensor, lambda x: done(x) if first and x.requires_grad else x, (args, kwargs))

    def end(self, result: Any) -> Any:
        """End a forward."""
        if self.state == "backward":
            return result
        if self.reshard:
            self.whole = None
        self.shared.order.append(self)
        self.state = "idle"
        if self.outermost:
            self.shared.arrived = None
        return tree_map_only(Tensor, self._followed, result)

    def _followed(self, result: Tensor) -> Tensor:
        if result.requires_grad:
            result.register_hook(lambda _: self._begin_backward())
        return result

    def _begin_backward(self) -> None:
        if self.state == "backward":
            return
        self.state = "backward"
        self.gather()
        self.wait()
        while self.shared.order and self.shared.order.pop() is not self:
            pass
        if self.shared.order:
            self.shared.order[-1].gather()

    def reduce(self) -> None:
        """Cut the gradients: backward of the unit is done."""
        self.state = "done"
        self.whole = self.coming = None
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        self.shared.cut = None
        if trained:
            count = sum(parameter.numel() for parameter in trained)
            self.shared.cut = _bytes(count * _SUM)
            for parameter in trained:
                parameter.grad = None
            part = _bytes(-(-count * _SUM // self.shared.ranks))  # summed, and then as the parameters are
            own = sum(parameter.numel() * self.shared.own[id(parameter)] for parameter in trained)
            self.kept.append(part if own == count * _SUM else _bytes(-(-own // self.shared.ranks)))


class _Before(torch.autograd.Function):
    """The input of a unit, whose gradient comes when the unit's backward is done."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], x: Tensor) -> Tensor:
        ctx.done = done
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.done()
        return None, *grads


@contextmanager
def gathered_units(
    units: Sequence[Unit], ranks: int, itemsize: int, own: Mapping[int, int]
) -> Iterator[Callable[[], None]]:
    """Let, inside this context, the units of a model on the meta device be gathered and cut.

    Args:
        units: in the order of `fully_shard`, so the model comes last. itemsize: bytes of a weight in products.
        own: bytes of an element of each parameter that ranks keep, by its id.
    Yields:
        What is to be called when backward is done. Gradients are gone then.
    """
    shared, taken, made, handles = _Gathering(ranks, itemsize, own), set[int](), [], []
    for modules, reshard, _ in units:
        found = {id(p): p for module in modules for p in module.parameters() if id(p) not in taken}
        taken.update(found)
        unit = _GatheredUnit(tuple(found.values()), reshard, modules[0] is units[-1].modules[0], shared)
        made.append(unit)
        left: set[nn.Module] = set()
        for module in modules:
            handles += [
                module.register_forward_pre_hook(partial(_begin, unit, modules, left), with_kwargs=True, prepend=True),
                module.register_forward_hook(partial(_end, unit, left)),
            ]

    def finish() -> None:
        for unit in reversed(made):
            if unit.state != "done":
                unit.reduce()
        shared.cut = shared.arrived = None

    try:
        yield finish
    finally:
        for handle in handles:
            handle.remove()


def _begin(
    unit: _GatheredUnit, modules: list[nn.Module], left: set[nn.Module], _: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    if not left:
        left.update(modules)
    return unit.begin(args, kwargs)


def _end(unit: _GatheredUnit, left: set[nn.Module], module: nn.Module, _: Any, result: Any) -> Any:
    left.discard(module)
    return result if left else unit.end(result)


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")

"""Which modules have the linear layers of an MLP: two, or three, whose sizes fit; and which only bear such a name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from tiled_torch.core.partitioned import whole_shape

NAMED = re.compile(r"(^|\.)(\w*mlp|ffn?|feed_forward|feedforward|shared_experts?|shared_mlp)$")
CLASSES = re.compile(r"MLP$|FeedForward|FFN$")


@dataclass(frozen=True)
class Roles:
    """Which linear layer is what. gate None: two matrices. fused: gate and up are one layer, in this order of halves."""

    gate: str | None
    up: str
    down: str
    fused: tuple[int, int] | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        return (*(name for name in (self.gate, self.up) if name is not None), self.down)


@dataclass(frozen=True)
class MLPLayout:
    """The children of a module that may be an MLP. linears: each with (in, out). others: what has no linear layer in it."""

    linears: dict[str, tuple[int, int]]
    others: tuple[str, ...]

    def roles(self) -> Iterator[Roles]:
        """Yield what each linear layer may be, by sizes; a probe tells which it is."""
        if len(self.linears) == 2:
            for up, down in permutations(self.linears):
                (_, wide), (narrow, _) = self.linears[up], self.linears[down]
                if wide == narrow:
                    yield Roles(None, up, down)
                elif wide == 2 * narrow:
                    yield from (Roles(None, up, down, fused=order) for order in ((0, 1), (1, 0)))
        elif len(self.linears) == 3:
            for gate, up, down in permutations(self.linears):
                if self.linears[gate] == self.linears[up] and self.linears[up][1] == self.linears[down][0]:
                    yield Roles(gate, up, down)


_ADAPTED = ("base_layer", "base")  # where adapters keep the layer that they stand for


def sizes_of(linear: Any) -> tuple[int, int] | None:
    """Return the number of inputs and outputs of whatever is called as a linear layer; None of another module."""
    if isinstance(linear, Conv1D):
        return whole_shape(linear.weight)[0], linear.nf
    found = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    if all(isinstance(size, int) for size in found):
        return found  # type: ignore[return-value]
    base = next(
        (getattr(linear, name) for name in _ADAPTED if isinstance(getattr(linear, name, None), nn.Module)), None
    )
    return None if base is None else sizes_of(base)


def layout_of(module: nn.Module) -> MLPLayout | None:
    """Return the layout of a module that has an MLP's linear layers among its children, and none deeper; None of another."""
    linears: dict[str, tuple[int, int]] = {}
    others: list[str] = []
    for name, child in module.named_children():
        found = sizes_of(child)
        if found is not None:
            linears[name] = found
        elif any(sizes_of(inner) is not None or isinstance(inner, _MIXING) for inner in child.modules()):
            return None
        else:
            others.append(name)
    layout = MLPLayout(linears, tuple(others))
    return layout if next(layout.roles(), None) is not None else None


# Layers that are no part of an MLP, and whose results depend on more tokens than one.
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Embedding, nn.modules.batchnorm._NormBase)


def is_named_mlp(name: str, module: nn.Module) -> bool:
    """Return whether a module calls itself an MLP: what is left of these is told."""
    named = NAMED.search(name) or CLASSES.search(type(module).__name__)
    return bool(named) and (is_routed(module) or any(sizes_of(inner) is not None for inner in module.modules()))


def is_routed(module: nn.Module) -> bool:
    """Return whether a module sends tokens to experts."""
    return any(name.startswith("experts") for name, _ in module.named_children())


def is_split_mlp(module: nn.Module) -> bool:
    """Return whether a layer calls the two halves of its MLP itself, modules of one linear layer each (DeBERTa's)."""
    halves = (getattr(module, name, None) for name in ("intermediate", "output"))
    linears = [
        [*filter(None, map(sizes_of, half.children()))] if isinstance(half, nn.Module) else [] for half in halves
    ]
    if [*map(len, linears)] != [1, 1]:
        return False
    (up,), (down,) = linears
    return up == down[::-1]


# Linear layers of an MLP whose formula is part of the forward of the layer around it, in the order of their calls.
_PAIRS = (("fc1", "fc2"), ("linear1", "linear2"), ("lin1", "lin2"), ("fc_in", "fc_out"))


def inline_pair(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of an MLP's linear layers that a module with other layers calls itself; None where it has none."""
    names = {name for name, child in module.named_children() if sizes_of(child) is not None}
    pair = next((pair for pair in _PAIRS if names.issuperset(pair)), None)
    return None if pair is None or layout_of(module) is not None else pair

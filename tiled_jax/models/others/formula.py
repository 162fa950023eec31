"""The formula of an MLP over the parameters of a module: which of them is which operand, and which activation is between."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jax.numpy as jnp
import numpy as np

from tiled_jax.core.activation_functions import activate_alone
from tiled_jax.models.others.form import Path

Shapes = Mapping[Path, tuple[int, ...]]
Parts = dict[str, "OperandSource"]


@dataclass(frozen=True)
class OperandSource:
    """One operand of the formula as a part of a parameter.

    pair: (dim, index) where gate and up are stacked along a dim of size two. half: 0 or 1 of [in, 2 out], or of a bias [2 out].
    transposed: the parameter is [out, in].
    """

    path: Path
    transposed: bool = False
    pair: tuple[int, int] | None = None
    half: int | None = None

    def of(self, values: Mapping[Path, Any]) -> Any:
        """Return the operand, [in, out] or [out]."""
        a = values[self.path]
        a = a if self.pair is None else a[(slice(None),) * self.pair[0] + (self.pair[1],)]
        a = a.T if self.transposed else a
        middle = a.shape[-1] // 2
        return a if self.half is None else a[..., :middle] if self.half == 0 else a[..., middle:]


@dataclass(frozen=True)
class Formula:
    """(act(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down, or without a gate; parts by the names of the operands."""

    parts: tuple[tuple[str, OperandSource], ...]
    activation: str

    def operands(self, values: Mapping[Path, Any]) -> dict[str, Any]:
        """Return the operands by name."""
        return {name: part.of(values) for name, part in self.parts}

    def __call__(self, values: Mapping[Path, Any], x: Any) -> Any:
        """Return the MLP of all tokens of x; NumPy's products where all are NumPy's."""
        w = self.operands(values)

        def project(name: str, x: Any) -> Any:
            y = x @ w[f"w_{name}"]
            return y + w[f"b_{name}"] if f"b_{name}" in w else y

        up = project("up", x)
        gate = project("gate", x) if "w_gate" in w else up
        act = activate_alone(self.activation, jnp.asarray(gate))
        act = np.asarray(act) if isinstance(gate, np.ndarray) else act
        return project("down", act * up if "w_gate" in w else act)


def candidates(shapes: Shapes, hidden: int, out: int) -> Iterator[Parts]:
    """Yield every way in which parameters of these shapes can be the operands of x [..., hidden] -> [..., out]."""
    matrices = [path for path, shape in shapes.items() if len(shape) == 2]
    pairs = [path for path, shape in shapes.items() if len(shape) == 3]
    owners = {path: _owner(path, [*matrices, *pairs]) for path, shape in shapes.items() if len(shape) == 1}
    if len(matrices) + len(pairs) + len(owners) < len(shapes) or None in owners.values():
        return
    for weights in _weights(shapes, matrices, pairs, hidden, out):
        parts = weights | _biases(weights, owners)
        if len(parts) - len(weights) == _needed(weights, owners) and _fit(parts, shapes):
            yield parts


def _weights(shapes: Shapes, matrices: list[Path], pairs: list[Path], hidden: int, out: int) -> Iterator[Parts]:
    if len(matrices) == 3 and not pairs:
        for gate, up, down in permutations(matrices):
            for inner in _inner(shapes[up], hidden):
                for w_gate in _oriented(gate, shapes[gate], hidden, inner):
                    for w_up in _oriented(up, shapes[up], hidden, inner):
                        for w_down in _oriented(down, shapes[down], inner, out):
                            yield {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    elif len(matrices) == 2 and not pairs:
        for up, down in permutations(matrices):
            for inner in _inner(shapes[up], hidden):
                for w_up in _oriented(up, shapes[up], hidden, inner):
                    for w_down in _oriented(down, shapes[down], inner, out):
                        yield {"w_up": w_up, "w_down": w_down}
                    for w_down in _oriented(down, shapes[down], inner // 2, out) if inner % 2 == 0 else ():
                        yield from _halves(up, w_up.transposed, w_down)
    elif len(matrices) == 1 and len(pairs) == 1:
        (down,), (both,) = matrices, pairs
        for dim in (0, 1, 2):
            if shapes[both][dim] != 2:
                continue
            shape = tuple(size for i, size in enumerate(shapes[both]) if i != dim)
            for inner in _inner(shape, hidden):
                for w_up in _oriented(both, shape, hidden, inner):
                    for w_down in _oriented(down, shapes[down], inner, out):
                        for first in (0, 1):
                            pair = [OperandSource(both, w_up.transposed, (dim, i)) for i in (first, 1 - first)]
                            yield {"w_gate": pair[0], "w_up": pair[1], "w_down": w_down}


def _halves(both: Path, transposed: bool, w_down: OperandSource) -> Iterator[Parts]:
    for first in (0, 1):
        gate, up = (OperandSource(both, transposed, half=i) for i in (first, 1 - first))
        yield {"w_gate": gate, "w_up": up, "w_down": w_down}


def _inner(shape: tuple[int, ...], hidden: int) -> set[int]:
    """Return what the other dim of a matrix of the hidden size may be."""
    return {shape[1 - dim] for dim in (0, 1) if shape[dim] == hidden}


def _oriented(path: Path, shape: tuple[int, ...], inputs: int, outputs: int) -> Iterator[OperandSource]:
    if shape == (inputs, outputs):
        yield OperandSource(path)
    if shape == (outputs, inputs):
        yield OperandSource(path, transposed=True)


def _owner(path: Path, weights: list[Path]) -> Path | None:
    """Return the weight that a vector is the bias of: the one of its layer, or the one that is named as it is."""
    beside = [weight for weight in weights if weight[:-1] == path[:-1]]
    if len(beside) == 1:
        return beside[0]
    name = str(path[-1])
    for weight in beside:
        if str(weight[-1]) in {
            name.replace("b_", "w_", 1),
            name.replace("bias", "kernel"),
            name.replace("bias", "weight"),
        }:
            return weight
    return None


def _biases(weights: Parts, owners: Mapping[Path, Path | None]) -> Parts:
    found = {}
    for name, part in weights.items():
        for path, owner in owners.items():
            if owner == part.path and part.pair is None:
                found["b" + name[1:]] = OperandSource(path, half=part.half)
    return found


def _needed(weights: Parts, owners: Mapping[Path, Path | None]) -> int:
    """Return how many biases there must be for every vector to be used."""
    return sum(sum(part.path == owner for part in weights.values()) for owner in owners.values())


def _fit(parts: Parts, shapes: Shapes) -> bool:
    """Return whether every bias is as long as its weight is wide."""

    def width(name: str) -> int:
        part, shape = parts[name], shapes[parts[name].path]
        shape = shape if part.pair is None else tuple(size for i, size in enumerate(shape) if i != part.pair[0])
        size = shape[0 if part.transposed and len(shape) == 2 else -1]
        return size if part.half is None else size // 2

    return all(width(name) == width("w" + name[1:]) for name in parts if name[0] == "b")

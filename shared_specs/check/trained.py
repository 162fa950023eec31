"""What one way of training leaves behind, step by step, in NumPy: what `check` compares."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shared_specs.check.compare import UNIT, error_of
from shared_specs.core.rounding import Array


@dataclass(frozen=True)
class Value:
    """A tensor: its numbers (16 bits as float32), and the name of the dtype in which it was kept."""

    array: Array
    dtype: str


@dataclass(kw_only=True)
class TrainedStep:
    """One step of the optimizer.

    Attributes:
        forward: module -> its first result, in the order in which they return; of modules that tiling does not take apart.
        given: module -> what its first argument was, where it is a tensor.
        loss: of the whole step. gradients: parameter -> its gradient before the optimizer, in the order of backward; None
            where there is none.
        hooks: hook of a module or a parameter -> how often it ran.
        updates: parameter -> its change since training began. buffers: name -> value after the step.
    """

    loss: Value
    forward: Mapping[str, Value] = field(default_factory=dict[str, Value])
    given: Mapping[str, Value] = field(default_factory=dict[str, Value])
    gradients: Mapping[str, Value | None] = field(default_factory=dict[str, "Value | None"])
    hooks: Mapping[str, int] = field(default_factory=dict[str, int])
    updates: Mapping[str, Value] = field(default_factory=dict[str, Value])
    buffers: Mapping[str, Value] = field(default_factory=dict[str, Value])


@dataclass(kw_only=True)
class Trained:
    """Every step of one way of training.

    Attributes:
        paths: tiled part -> the path that ran. computes: the coarsest dtype that it computes in.
        draws: whether it drew random numbers.
    """

    steps: list[TrainedStep]
    paths: dict[str, str] = field(default_factory=dict[str, str])
    computes: str = "float32"
    draws: bool = False


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the floating-point dtype of fewest digits; float64 where there is none."""
    return max((dtype for dtype in dtypes if dtype in UNIT), key=lambda dtype: UNIT[dtype], default="float64")


def furthest(plain: TrainedStep, other: TrainedStep) -> float:
    """Return by how much the loss or a module's result differs most, relatively."""
    common = [name for name in plain.forward if name in other.forward]
    pairs = [(plain.loss, other.loss), *((plain.forward[name], other.forward[name]) for name in common)]
    errors = [error_of(a.array, b.array) for a, b in pairs if a.array.shape == b.array.shape and a.dtype in UNIT]
    return max(errors, default=0.0)


def is_finite(trained: Trained) -> bool:
    """Return whether every loss, gradient and result of a module is finite."""
    for step in trained.steps:
        for value in (step.loss, *step.forward.values(), *step.gradients.values()):
            if value is not None and value.dtype in UNIT and not np.isfinite(value.array).all():
                return False
    return True

"""What one way of training leaves behind, step by step, in NumPy: what `check` compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared_specs.core.rounding import Array

# In the order in which a step makes them, and in which a difference is looked for.
KINDS = ("forward", "loss", "gradient", "hook", "parameter", "buffer")


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
    """Every step of one way of training, the path of each tiled part, and the peak bytes of a step without its parameters."""

    steps: list[TrainedStep]
    paths: dict[str, str] = field(default_factory=dict[str, str])
    peak_bytes: int = 0

"""How far a result may be from another computation of it, and what it is called: `verify` and `check` share this."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from shared_specs.core.rounding import Array
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, NOTHING, limit


def named_results(value: Any, is_result: Callable[[Any], bool], name: str = "y") -> dict[str, Any]:
    """Return everything that is one among what a module returns, by its name: y, y[1], y.logits."""
    if is_result(value):
        return {name: value}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, Mapping | type):
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{name}.{key}", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{name}[{number}]", part) for number, part in enumerate(value)]
    return {place: found for where, part in parts for place, found in named_results(part, is_result, where).items()}


def length(arrays: Iterable[Array]) -> float:
    """Return the L2 norm of all of them together."""
    return math.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays))


def error_of(actual: Array, expected: Array, least: float = 0.0) -> float:
    """Return the relative L2 distance; of what is shorter than `least`, that to `least`."""
    expected = expected.astype(np.float64)
    distance = float(np.linalg.norm((actual.astype(np.float64) - expected).ravel()))
    longest = max(float(np.linalg.norm(expected.ravel())), least)
    return distance / longest if longest else distance


def least_of(gradients: Iterable[Array]) -> float:
    """Return the norm below which a gradient is rounding among these, as that of a bias in front of a softmax is."""
    return NOTHING * length(gradients)


def limit_of(baseline: float, dtype: str, *, rounding: bool = False, floor: float = 0.0) -> float:
    """Return the largest relative error allowed where the untiled computation errs by `baseline`.

    rounding: no digit of the expected value is known, in no order of sums. floor: allowed at least.
    """
    most = max(limit(baseline, dtype), DISTRIBUTED_FLOAT64, floor)
    return max(most, UNIT[dtype] / NOTHING) if rounding else most


# The distance between 1 and the next number.
UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

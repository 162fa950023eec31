"""Activations that are given as functions: the points at which one is compared, and what is said of one that is none."""

from collections.abc import Callable
from typing import Any, Never

import numpy as np

from shared_specs.config import ACTIVATIONS
from shared_specs.errors import fail

_FAR = [10.0, 50.0, 1e3, 1e4]
POINTS = np.asarray([*np.linspace(-9, 9, 181), *_FAR, *(-a for a in _FAR)], np.float32)


def fail_unknown_function(function: str, activation: Callable[..., Any], *, state: bool = False) -> Never:
    """Raise SpecError for a function that computes none of ACTIVATIONS. state: it has state or hooks."""
    rule = "one of " + ", ".join(ACTIVATIONS) + ", or a function that computes one of them"
    name = getattr(activation, "__name__", type(activation).__name__)
    why = "It has state or hooks of its own" if state else "Its values or slopes are those of none"
    advice = f"{why}: `tile` takes a module with any activation."
    fail(function, "activation", rule, f"the function {name}", advice=advice)

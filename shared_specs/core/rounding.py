"""The baseline: the oracle's own lines with the roundings of a plain implementation in the case's dtype.

Products run in float32 NumPy for float32, bfloat16 and float16 (float64 for float64), elementwise work in float32, and
every value that a plain implementation stores is rounded to the dtype. Its error against the oracle is what the dtype
can do; limits are multiples of it (`shared_specs/tolerances.py`).
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def compute_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype in which the baseline works: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def round_to(dtype: str) -> Callable[[Array], Array]:
    """Return a function that rounds to `dtype` and comes back in the compute dtype."""
    stored, compute = DTYPES[dtype], compute_dtype(dtype)

    def rounding(value: Array) -> Array:
        with np.errstate(over="ignore"):
            return value.astype(stored).astype(compute)

    return rounding


def relative_error(actual: Array, truth: Array) -> float:
    """Relative L2 distance to the truth, in float64; 0 where both are zero everywhere, inf where only the truth is."""
    actual64, truth64 = actual.astype(np.float64), truth.astype(np.float64)
    distance, size = float(np.linalg.norm(actual64 - truth64)), float(np.linalg.norm(truth64))
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size

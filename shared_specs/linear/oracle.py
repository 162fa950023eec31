"""Forward and backward of one linear layer, y = x w + b: the truth for every number of weight tiles.

As `oracle/mlp.py`, it is the oracle in float64 with `rounding=None`, and the baseline with float32 products and a
rounding at every value that a plain implementation stores. Weights are [in, out].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Round = Callable[[Array], Array]


def linear(
    x: Array, weight: Array, dy: Array, *, bias: Array | None = None, rounding: Round | None = None
) -> dict[str, Array]:
    """y and every gradient of sum(y * dy): y, dx, dweight and, with bias, dbias.

    Args:
        x, dy: [T, in] and [T, out]. weight: [in, out]. bias: [out] or None.
        rounding: applied to every value a plain implementation would store; None keeps full precision.
    """
    r: Round = rounding or (lambda value: value)
    product = x @ weight
    results = {"y": r(product if bias is None else product + bias), "dx": r(dy @ weight.T), "dweight": r(x.T @ dy)}
    if bias is not None:
        results["dbias"] = r(dy.sum(0))
    return results

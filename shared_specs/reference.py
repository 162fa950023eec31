"""The truth and the baseline of a case of the MLP, of a mixture of experts or of a loss."""

from typing import Any

import numpy as np

from shared_specs.core.rounding import Array, compute_dtype
from shared_specs.loss.cases import LossCase, evaluate_loss
from shared_specs.mlp.cases import MLPCase, evaluate_mlp
from shared_specs.moe.cases import MoECase, evaluate_moe

Case = MLPCase | LossCase | MoECase


def is_frozen(case: Case, quantity: str) -> bool:
    """Return whether the gradient called `quantity` (dx, dw_gate, ...) is of an operand the case freezes."""
    return quantity.removeprefix("d") in case.frozen and quantity.startswith("d")


def oracle(case: Case) -> dict[str, Array]:
    """Return the truth in float64: the results and the gradient of every operand that is not frozen."""
    return _evaluate(case, np.dtype(np.float64), rounded=False)


def baseline(case: Case) -> dict[str, Array]:
    """Return the results of a plain implementation in the case's dtype (`shared_specs/core/rounding.py`)."""
    return _evaluate(case, compute_dtype(case.dtype), rounded=True)


def _evaluate(case: Case, dtype: np.dtype[Any], *, rounded: bool) -> dict[str, Array]:
    if isinstance(case, LossCase):
        results = evaluate_loss(case, dtype, rounded)
    elif isinstance(case, MoECase):
        results = evaluate_moe(case, dtype, rounded)
    else:
        results = evaluate_mlp(case, dtype, rounded)
    return {name: value for name, value in results.items() if not is_frozen(case, name)}

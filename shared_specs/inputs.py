"""The arrays of a case: drawn from its seed in float64, rounded to its dtype, the same for every half and backend."""

from typing import Any

import numpy as np

from shared_specs.cases import MLPCase
from shared_specs.oracle.mlp import mlp
from shared_specs.rounding import DTYPES, compute_dtype, round_to

Array = np.ndarray[Any, Any]


def make_inputs(case: MLPCase) -> dict[str, Array]:
    """x [*dims, H], dy [*dims, H_out], w_gate and w_up [H, I], w_down [I, H_out], b_* ; weights are [in, out].

    An expanded layout repeats one row along the last leading dim, so that a zero stride can hold the same values.
    """
    rng = np.random.default_rng(case.seed)
    out = case.hidden if case.out is None else case.out
    arrays = {
        "x": case.scale * rng.standard_normal((*case.dims, case.hidden)),
        "dy": rng.standard_normal((*case.dims, out)) + 0.25,
        "w_gate": rng.standard_normal((case.hidden, case.intermediate)) / np.sqrt(case.hidden),
        "w_up": rng.standard_normal((case.hidden, case.intermediate)) / np.sqrt(case.hidden),
        "w_down": rng.standard_normal((case.intermediate, out)) / np.sqrt(case.intermediate),
    }
    widths = {"gate": case.intermediate, "up": case.intermediate, "down": out}
    arrays |= {f"b_{name}": 0.5 * rng.standard_normal(widths[name]) for name in case.biases}
    if not case.gated:
        del arrays["w_gate"]
    for name, layout in (("x", case.x_layout), ("dy", case.dy_layout)):
        if layout == "expanded":
            arrays[name] = np.broadcast_to(arrays[name][..., :1, :], arrays[name].shape)
    return {name: np.ascontiguousarray(array).astype(DTYPES[case.dtype]) for name, array in arrays.items()}


def _evaluate(case: MLPCase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    arrays = {name: array.astype(dtype) for name, array in make_inputs(case).items()}
    x, dy = arrays["x"].reshape(-1, case.hidden), arrays["dy"].reshape(-1, arrays["dy"].shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        results = mlp(
            x,
            arrays.get("w_gate"),
            arrays["w_up"],
            arrays["w_down"],
            dy,
            biases={name: arrays[f"b_{name}"] for name in case.biases},
            activation=case.activation,
            rounding=round_to(case.dtype) if rounded else None,
        )
    results["y"] = results["y"].reshape(arrays["dy"].shape)
    results["dx"] = results["dx"].reshape(arrays["x"].shape)
    return {name: value for name, value in results.items() if not is_frozen(case, name)}


def is_frozen(case: MLPCase, quantity: str) -> bool:
    """Whether the gradient called `quantity` (dx, dw_gate, ...) is of an operand the case freezes."""
    return quantity.removeprefix("d") in case.frozen and quantity.startswith("d")


def oracle(case: MLPCase) -> dict[str, Array]:
    """The truth in float64: y and the gradient of every operand that is not frozen."""
    return _evaluate(case, np.dtype(np.float64), rounded=False)


def baseline(case: MLPCase) -> dict[str, Array]:
    """What a plain implementation in the case's dtype would give (`shared_specs/rounding.py`)."""
    return _evaluate(case, compute_dtype(case.dtype), rounded=True)

"""The arrays of a case: drawn from its seed in float64, rounded to its dtype, the same for every half and backend."""

from typing import Any

import numpy as np

from shared_specs.cases import LossCase, MLPCase
from shared_specs.config import DIFFERENTIABLE_OUTPUTS, LossOptions
from shared_specs.oracle.loss import linear_cross_entropy
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


def make_loss_inputs(case: LossCase) -> dict[str, Array]:
    """x [*dims, H], weight [H, V], bias [V], targets [*dims] (int64), class_weight [V] and upstream gradients.

    `d<name>` is the upstream gradient of a result, in the dtype results have: float32, float64 for float64.
    """
    rng = np.random.default_rng(case.seed)
    stored, wide = DTYPES[case.dtype], compute_dtype(case.dtype)
    arrays = {
        "x": (case.scale * rng.standard_normal((*case.dims, case.hidden))).astype(stored),
        "weight": (rng.standard_normal((case.hidden, case.vocab)) / np.sqrt(case.hidden)).astype(stored),
    }
    if case.bias:
        arrays["bias"] = (0.5 * rng.standard_normal(case.vocab)).astype(stored)
    if case.class_weight:
        arrays["class_weight"] = (case.class_scale * rng.uniform(0.25, 2.0, case.vocab)).astype(wide)
    flat = rng.integers(0, case.vocab, int(np.prod(case.dims)))
    tokens = np.arange(flat.size)
    ignored = {
        "none": tokens < 0,
        "some": tokens % 3 == 1,
        "all": tokens >= 0,
        "first": tokens < flat.size // 2,
        "last": tokens >= flat.size // 2,
    }[case.ignored]
    arrays["targets"] = np.where(ignored, case.ignore_index, flat).reshape(case.dims)
    per_token = case.dims if case.reduction == "none" else ()
    arrays["dloss"] = np.asarray(case.upstream * (rng.standard_normal(per_token) if per_token else 1.0), wide)
    for name in case.outputs:
        if name in DIFFERENTIABLE_OUTPUTS:
            arrays[f"d{name}"] = (case.upstream * rng.standard_normal(case.dims)).astype(wide)
    return arrays


def loss_options(case: LossCase, class_weight: Any = None, num_valid: Any = None) -> LossOptions:
    """The case's options, with the arrays given in the form of whoever calls."""
    return LossOptions(
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        logit_softcap=case.logit_softcap,
        logit_scale=case.logit_scale,
        reduction=case.reduction,
        outputs=case.outputs,
        class_weight=class_weight,
        num_valid=case.num_valid if num_valid is None else num_valid,
    )


def _evaluate_loss(case: LossCase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    arrays = {k: v if k == "targets" else v.astype(dtype) for k, v in make_loss_inputs(case).items()}
    upstream = {
        name[1:]: array.reshape(-1) if array.ndim else array for name, array in arrays.items() if name[0] == "d"
    }
    results = linear_cross_entropy(
        arrays["x"].reshape(-1, case.hidden),
        arrays["weight"],
        arrays["targets"].reshape(-1),
        upstream,
        bias=arrays.get("bias"),
        options=loss_options(case, arrays.get("class_weight")),
        rounding=round_to(case.dtype) if rounded else None,
    )
    for name in ("loss", *case.outputs):
        if results[name].ndim:
            results[name] = results[name].reshape(case.dims)
    results["dx"] = results["dx"].reshape(arrays["x"].shape)
    return {name: np.asarray(value) for name, value in results.items() if not is_frozen(case, name)}


def is_frozen(case: MLPCase | LossCase, quantity: str) -> bool:
    """Whether the gradient called `quantity` (dx, dw_gate, ...) is of an operand the case freezes."""
    return quantity.removeprefix("d") in case.frozen and quantity.startswith("d")


def oracle(case: MLPCase | LossCase) -> dict[str, Array]:
    """The truth in float64: the results and the gradient of every operand that is not frozen."""
    evaluate = _evaluate_loss if isinstance(case, LossCase) else _evaluate
    return evaluate(case, np.dtype(np.float64), rounded=False)  # type: ignore[arg-type]


def baseline(case: MLPCase | LossCase) -> dict[str, Array]:
    """What a plain implementation in the case's dtype would give (`shared_specs/rounding.py`)."""
    evaluate = _evaluate_loss if isinstance(case, LossCase) else _evaluate
    return evaluate(case, compute_dtype(case.dtype), rounded=True)  # type: ignore[arg-type]

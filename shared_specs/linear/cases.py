"""The cases of `TiledLinear`, their arrays, their truth and their baseline, once for both halves."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shared_specs.core.rounding import DTYPES, compute_dtype, round_to
from shared_specs.linear.oracle import linear

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """One call of `TiledLinear` and what it must get right.

    Args:
        dims: leading dims of x, (T,) or (B, S).
        already_split: x is handed over as a list of its input splits. combined: outputs come back as one array; where
            not, as a list of output splits, which tests join.
        return_bias: the layer is `TiledLinearReturnBias`, and tests add the bias that it returns.
        frozen: operands without a gradient, among x, weight and bias. scale: factor on x.
    """

    dims: tuple[int, ...]
    in_features: int = 13
    out_features: int = 11
    in_splits: int = 3
    out_splits: int = 4
    bias: bool = True
    already_split: bool = False
    combined: bool = True
    return_bias: bool = False
    dtype: str = "float32"
    frozen: tuple[str, ...] = ()
    scale: float = 1.0
    seed: int = 0
    reason: str = field(compare=False)

    @property
    def id(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[self.dtype]
        parts = ["linear", short, "x".join(map(str, self.dims)), f"{self.in_features}to{self.out_features}"]
        parts += [f"tiles{self.in_splits}x{self.out_splits}"]
        parts += [] if self.bias else ["no_bias"]
        parts += [name for name in ("already_split", "return_bias") if getattr(self, name)]
        parts += [] if self.combined else ["apart"]
        parts += [f"frozen_{name}" for name in self.frozen]
        parts += [f"scale{self.scale:g}"] if self.scale != 1.0 else []
        return "-".join(parts)


def _linear_cases() -> tuple[LinearCase, ...]:
    base = LinearCase(dims=(3, 5), reason="the ordinary case: neither size is divisible by its number of splits")
    cases = [replace(base, dtype=dtype) for dtype in ("float64", "float32", "bfloat16", "float16")]
    for dtype in ("float64", "float32", "bfloat16"):
        cases += [
            replace(base, dtype=dtype, bias=False, reason="no bias"),
            replace(base, dtype=dtype, in_splits=1, reason="outputs alone are split: dx is a sum over tiles"),
            replace(base, dtype=dtype, out_splits=1, reason="inputs alone are split: y is a sum over tiles"),
            replace(
                base, dtype=dtype, already_split=True, combined=False, reason="one layer's outputs, another's inputs"
            ),
            replace(base, dtype=dtype, return_bias=True, reason="a layer that leaves its bias to the caller"),
        ]
    cases += [
        replace(base, in_splits=1, out_splits=1, reason="one tile: the plain layer"),
        replace(base, in_splits=13, out_splits=11, reason="tiles of one number"),
        replace(base, in_features=12, out_features=8, in_splits=4, out_splits=2, reason="even tiles"),
        replace(base, in_features=1, out_features=1, in_splits=1, out_splits=1, reason="the smallest matrix"),
        replace(base, dims=(7,), reason="one leading dim"),
        replace(base, dims=(2, 3, 2), reason="three leading dims"),
        replace(base, dims=(1,), reason="one token"),
        replace(base, dims=(0,), reason="no tokens"),
        replace(base, already_split=True, reason="split input, joined output"),
        replace(base, combined=False, reason="whole input, outputs apart"),
        replace(base, return_bias=True, combined=False, reason="outputs apart, each with its bias"),
        replace(base, return_bias=True, bias=False, reason="no bias to return"),
        replace(base, frozen=("x",), reason="the first layer of a model"),
        replace(base, frozen=("weight",), reason="a frozen weight with a trained bias"),
        replace(base, frozen=("weight", "bias"), reason="a frozen layer"),
        replace(base, frozen=("x", "weight"), reason="only the bias trains"),
        replace(base, scale=1e3, reason="large values"),
        replace(base, dtype="bfloat16", in_features=128, in_splits=64, out_splits=1, reason="y is a sum of 64 tiles"),
        replace(base, dtype="bfloat16", out_features=128, in_splits=1, out_splits=64, reason="dx is a sum of 64 tiles"),
        replace(base, dtype="float16", in_features=64, in_splits=32, scale=30.0, reason="float16 sums of 32 tiles"),
        replace(base, dtype="bfloat16", dims=(4, 32), in_features=96, out_features=64, reason="larger sums"),
    ]
    return tuple(cases)


LINEAR_CASES = _linear_cases()


def make_linear_inputs(case: LinearCase) -> dict[str, Array]:
    """Return x [*dims, in], weight [in, out], bias [out] where there is one, dy [*dims, out], in the case's dtype."""
    rng = np.random.default_rng(case.seed)
    arrays = {
        "x": case.scale * rng.standard_normal((*case.dims, case.in_features)),
        "weight": rng.standard_normal((case.in_features, case.out_features)) / np.sqrt(case.in_features),
        "bias": 0.5 * rng.standard_normal(case.out_features),
        "dy": rng.standard_normal((*case.dims, case.out_features)) + 0.25,
    }
    if not case.bias:
        del arrays["bias"]
    return {name: np.ascontiguousarray(array).astype(DTYPES[case.dtype]) for name, array in arrays.items()}


def linear_oracle(case: LinearCase) -> dict[str, Array]:
    """Return the truth in float64: y and the gradient of every operand that is not frozen."""
    return _evaluate(case, np.dtype(np.float64), rounded=False)


def linear_baseline(case: LinearCase) -> dict[str, Array]:
    """Return the results of one plain linear layer in the case's dtype."""
    return _evaluate(case, compute_dtype(case.dtype), rounded=True)


def _evaluate(case: LinearCase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    arrays = {name: array.astype(dtype) for name, array in make_linear_inputs(case).items()}
    results = linear(
        arrays["x"].reshape(-1, case.in_features),
        arrays["weight"],
        arrays["dy"].reshape(-1, case.out_features),
        bias=arrays.get("bias"),
        rounding=round_to(case.dtype) if rounded else None,
    )
    results["y"] = results["y"].reshape(arrays["dy"].shape)
    results["dx"] = results["dx"].reshape(arrays["x"].shape)
    return {name: value for name, value in results.items() if name == "y" or name[1:] not in case.frozen}

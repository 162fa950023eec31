"""The assertions must be able to fail: mutants of a right answer are all refused, the right answer is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared_specs import reference
from shared_specs.core.rounding import relative_error
from shared_specs.mlp.cases import MLP_CASES, MLPCase, make_inputs
from shared_specs.mlp.oracle import mlp
from shared_specs.tolerances import FLOOR
from tests.adapters import ADAPTERS
from tests.asserting import assert_case, assert_near, assert_within, truth

CASES = [next(case for case in MLP_CASES if case.dtype == dtype) for dtype in ("float64", "float32", "bfloat16")]
MANY = [replace(case, dims=(256,), num_shards=64) for case in CASES]


def right(case: MLPCase) -> dict[str, Any]:
    return dict(ADAPTERS["numpy"].run(case))


def drop_a_shard(case: MLPCase, results: dict[str, Any]) -> None:
    """The last of 64 shards is missing from the weight gradients."""
    arrays = {name: array.astype(np.float64) for name, array in make_inputs(case).items()}
    x, dy = arrays["x"].reshape(-1, case.hidden)[:-4], arrays["dy"].reshape(-1, case.hidden)[:-4]
    partial = mlp(x, arrays["w_gate"], arrays["w_up"], arrays["w_down"], dy)
    results["dw_up"] = partial["dw_up"].astype(results["dw_up"].dtype)


def swap_gate_and_up(case: MLPCase, results: dict[str, Any]) -> None:
    results["dw_gate"], results["dw_up"] = results["dw_up"], results["dw_gate"]


def transpose_down(case: MLPCase, results: dict[str, Any]) -> None:
    results["dw_down"] = results["dw_down"].T


def lose_a_gradient(case: MLPCase, results: dict[str, Any]) -> None:
    results["dw_down"] = None


def omit_a_gradient(case: MLPCase, results: dict[str, Any]) -> None:
    del results["dx"]


def one_nan(case: MLPCase, results: dict[str, Any]) -> None:
    results["y"] = results["y"].copy()
    results["y"].flat[0] = np.nan


def zeros(case: MLPCase, results: dict[str, Any]) -> None:
    results["dx"] = np.zeros_like(results["dx"])


def wrong_dtype(case: MLPCase, results: dict[str, Any]) -> None:
    results["dx"] = results["dx"].astype(np.float16)


MUTANTS = [
    drop_a_shard,
    swap_gate_and_up,
    transpose_down,
    lose_a_gradient,
    omit_a_gradient,
    one_nan,
    zeros,
    wrong_dtype,
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.dtype)
def test_right_answer_passes(case: MLPCase) -> None:
    assert_case(case, right(case))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.dtype)
def test_mutant_is_refused(case: MLPCase, mutant: Any) -> None:
    results = right(case)
    mutant(case, results)
    with pytest.raises(AssertionError):
        assert_case(case, results)


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.dtype)
def test_two_and_a_half_times_the_error_of_the_baseline_is_refused(case: MLPCase) -> None:
    """And not only tens of times: a limit of four times the baseline would let most mutants of one rounding pass."""
    oracle, limits = truth(case)
    for name, expected in oracle.items():
        baseline = relative_error(reference.baseline(case)[name], expected)
        assert_within(expected * (1 + 1.9 * baseline), expected, limits[name], name)
        wrong = expected * (1 + 2.5 * baseline + 1.01 * FLOOR[case.dtype])
        with pytest.raises(AssertionError, match="relative error"):
            assert_within(wrong, expected, limits[name], name)


def test_zero_truth_asks_for_exact_zero() -> None:
    assert_within(np.zeros(3), np.zeros(3), 0.0, "zeros")
    with pytest.raises(AssertionError, match="relative error"):
        assert_within(np.full(3, 1e-30), np.zeros(3), 1.0, "not zeros")


def test_near_refuses_what_is_not() -> None:
    """Two roundings of float32 apart passes; another value, dtype or shape, NaN and nothing do not."""
    torch = pytest.importorskip("torch")
    right = torch.tensor([1.0, -2.0, 3.0])
    assert_near(right * (1 + 2**-23), right)
    wrong = [right * (1 + 2**-20), right.double(), right[:2], right.where(right > 0, torch.nan), None]
    for each in wrong:
        with pytest.raises(AssertionError):
            assert_near(each, right)

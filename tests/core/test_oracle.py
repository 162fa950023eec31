"""The oracle by central differences and by closed forms; the baseline against the oracle."""

import math

import numpy as np
import pytest

from shared_specs.config import ACTIVATIONS, LossOptions
from shared_specs.core.rounding import DTYPES, relative_error, round_to
from shared_specs.loss.cases import LOSS_CASES, LossCase, loss_options, make_loss_inputs
from shared_specs.loss.oracle import linear_cross_entropy
from shared_specs.mlp.cases import MLP_CASES, MLPCase, make_inputs
from shared_specs.mlp.oracle import activate, erf, mlp
from shared_specs.reference import baseline, oracle
from shared_specs.tolerances import FACTOR, FLOOR, limit

STEP = 1e-6
CENTRAL = 2e-8  # what central differences at STEP resolve; not a limit on any half

RELATIVE = {
    "silu": lambda a: a / (1 + math.exp(-a)),
    "gelu": lambda a: a * (1 + math.erf(a / math.sqrt(2))) / 2,
    "gelu_tanh": lambda a: a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) / 2,
    "relu": lambda a: max(a, 0.0),
    "relu_squared": lambda a: max(a, 0.0) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_slope(activation: str) -> None:
    a = np.linspace(-6, 6, 97) + 0.01
    value, slope = activate(activation, a)
    np.testing.assert_array_less(np.abs(value - [RELATIVE[activation](v) for v in a]), 1e-13)
    up, down = (np.array([RELATIVE[activation](v + s) for v in a]) for s in (STEP, -STEP))
    np.testing.assert_array_less(np.abs(slope - (up - down) / (2 * STEP)), 1e-7)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_by_central_differences(activation: str, gated: bool) -> None:
    rng = np.random.default_rng(3)
    shapes = {"x": (5, 4), "w_gate": (4, 6), "w_up": (4, 6), "w_down": (6, 3)}
    shapes |= {"gate": (6,), "up": (6,), "down": (3,)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    dy = rng.standard_normal((5, 3))
    if not gated:
        del arrays["w_gate"], arrays["gate"]

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        biases = {name: arrays[name] for name in ("gate", "up", "down") if name in arrays}
        weights = (arrays.get("w_gate"), arrays["w_up"], arrays["w_down"])
        return mlp(arrays["x"], *weights, dy, biases=biases, activation=activation)

    gradients = run(arrays)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        sides = [(run({**arrays, name: array + sign * STEP * direction})["y"] * dy).sum() for sign in (1, -1)]
        analytic = (gradients[f"d{name}" if name[0] in "xw" else f"db_{name}"] * direction).sum()
        assert abs(analytic - (sides[0] - sides[1]) / (2 * STEP)) <= CENTRAL * (1 + abs(analytic))


def test_erf_is_exact_in_float64() -> None:
    values = np.linspace(-4, 4, 41)
    assert np.array_equal(erf(values), [math.erf(v) for v in values])


@pytest.mark.parametrize("case", MLP_CASES, ids=lambda case: case.id)
def test_baseline_is_close_and_finite(case: MLPCase) -> None:
    truth, rounded = oracle(case), baseline(case)
    assert set(truth) == set(rounded)
    step = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[case.dtype]
    for name, value in truth.items():
        assert np.isfinite(value).all()
        assert relative_error(rounded[name], value) <= step * 10


def test_inputs_are_rounded_reproducible_and_of_the_dtype() -> None:
    for case in MLP_CASES:
        first, second = make_inputs(case), make_inputs(case)
        for name, array in first.items():
            assert array.dtype == DTYPES[case.dtype]
            assert np.array_equal(array.view(np.uint8), second[name].view(np.uint8))
        assert case.reason


def test_ids_are_unique() -> None:
    ids = [case.id for case in MLP_CASES]
    assert len(ids) == len(set(ids))


def test_rounding_is_to_nearest_even() -> None:
    assert round_to("bfloat16")(np.float32([1.00390625, 1.01171875])).tolist() == [1.0, 1.015625]


def test_relative_error() -> None:
    one = np.ones(4)
    assert relative_error(one, one) == 0.0
    assert relative_error(1.01 * one, one) == pytest.approx(0.01, rel=FLOOR["float64"])
    assert relative_error(0 * one, 0 * one) == 0.0
    assert relative_error(one, 0 * one) == math.inf


def test_limits() -> None:
    assert limit(0.25, "bfloat16") == FACTOR * 0.25 + FLOOR["bfloat16"]
    assert set(FLOOR) == set(DTYPES)


@pytest.mark.parametrize("case", [case for case in LOSS_CASES if case.dtype == "float64"], ids=lambda case: case.id)
def test_loss_gradients_by_central_differences(case: LossCase) -> None:
    arrays, rng = make_loss_inputs(case), np.random.default_rng(3)
    upstream = {
        name[1:]: array.reshape(-1) if array.ndim else array for name, array in arrays.items() if name[0] == "d"
    }

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return linear_cross_entropy(
            arrays["x"].reshape(-1, case.hidden),
            arrays["weight"],
            arrays["targets"].reshape(-1),
            upstream,
            bias=arrays.get("bias"),
            options=loss_options(case, arrays.get("class_weight")),
        )

    gradients = run(arrays)
    for name in ("x", "weight", "bias"):
        if name in arrays:
            direction = rng.standard_normal(arrays[name].shape)
            results = [run({**arrays, name: arrays[name] + sign * STEP * direction}) for sign in (1, -1)]
            sides = [sum((result[key] * g).sum() for key, g in upstream.items()) for result in results]
            analytic = (gradients[f"d{name}"].reshape(direction.shape) * direction).sum()
            assert abs(analytic - (sides[0] - sides[1]) / (2 * STEP)) <= CENTRAL * (1 + abs(analytic))


def test_loss_by_its_definition() -> None:
    """A few tokens by hand: two classes, one ignored token."""
    x, weight, targets = np.eye(3), np.array([[2.0, 0.0], [1.0, 3.0], [5.0, 5.0]]), np.array([0, 0, -100])
    options = LossOptions(outputs=("log_probs", "lse", "entropy", "accuracy"))
    found = linear_cross_entropy(x, weight, targets, {"loss": np.array(1.0)}, options=options)
    p = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))]
    np.testing.assert_array_less(np.abs(found["log_probs"] - np.array([math.log(p[0]), math.log(p[1]), 0.0])), 1e-14)
    np.testing.assert_array_less(np.abs(found["loss"] - np.array(-(math.log(p[0]) + math.log(p[1])) / 2)), 1e-14)
    np.testing.assert_array_less(np.abs(found["lse"][2] - np.array(5 + math.log(2))), 1e-14)
    np.testing.assert_array_less(np.abs(found["entropy"][2] - np.array(math.log(2))), 1e-14)
    assert found["accuracy"] == 0.5
    assert not found["dx"][2].any()


def test_loss_of_nothing_is_zero() -> None:
    for case in LOSS_CASES:
        if case.ignored == "all" and not case.outputs:
            assert not any(value.any() for value in oracle(case).values())


def test_loss_case_ids_are_unique() -> None:
    assert len({case.id for case in LOSS_CASES}) == len(LOSS_CASES)

"""The comparison behind `check`: what is as exact as the untiled training is right, and what is further off is not."""

import numpy as np
import pytest

from shared_specs.check.judge import judged
from shared_specs.check.trained import Trained, TrainedStep, Value, coarsest
from shared_specs.tolerances import between, limit

NAMES = ("a", "b", "c")


def trained(error=0.0, computes="float32", **parts):
    """A step whose every gradient is further off by this, relatively."""
    values = {name: Value(np.full(4, 1 + error, np.float32), "float32") for name in NAMES}
    loss = Value(np.array(2.0, np.float32), "float32")
    step = TrainedStep(loss=loss, gradients=values | parts.pop("gradients", {}), **parts)
    return Trained(steps=[step], computes=computes)


def first(plain, tiled, truth, same_steps=True, disturbed=None):
    rows = judged(plain, tiled, truth, disturbed or plain, same_steps=same_steps)
    return next(((row.kind, row.name) for row in rows if not row.right), None)


def test_what_the_untiled_training_errs_the_tiled_one_may():
    allowed = limit(1e-3, "float32")
    for factor, found in ((0.9, None), (1.2, ("gradient", "a"))):
        assert first(trained(1e-3), trained(factor * allowed), trained()) == found


def test_what_is_exact_by_chance_may_err_as_most_do():
    lucky = {"a": Value(np.ones(4, np.float32), "float32")}
    assert first(trained(1e-3, gradients=lucky), trained(1e-3), trained()) is None
    assert first(trained(0.0), trained(1e-3), trained()) == ("gradient", "a")


@pytest.mark.parametrize("computes", ["float32", "bfloat16"])
def test_without_a_truth_limits_are_the_usual_ones(computes):
    usual = between(computes)
    for factor, found in ((0.9, None), (1.2, ("gradient", "a"))):
        assert first(trained(), trained(factor * usual, computes), None) == found


def test_a_disturbed_training_explains_what_follows_from_the_first_step():
    def steps(*errors):
        return Trained(steps=[trained(error).steps[0] for error in errors])

    exact, apart = steps(0, 0), steps(0, 1e-3)
    assert first(exact, apart, exact) == ("gradient", "a")
    assert first(exact, apart, exact, disturbed=apart) is None
    assert first(steps(0), steps(1e-3), steps(0), disturbed=steps(1e-3)) == ("gradient", "a")


def test_the_change_of_a_parameter_is_compared_where_its_gradients_sign_is_known():
    def with_change(error, change):
        changes = Value(np.array([change, 1.0, 1.0, 1.0]), "float32")
        size = {"a": Value(np.array([1e-4 + error, 1.0, 1.0, 1.0]), "float32")}
        return trained(gradients=size, updates={"a": changes})

    assert first(with_change(1e-4, 1.0), with_change(0.0, -1.0), with_change(0.0, 1.0)) is None
    assert first(with_change(1e-9, 1.0), with_change(0.0, -1.0), with_change(0.0, 1.0)) == ("parameter", "a")


def test_rounding_may_be_another_and_no_more():
    eps = float(np.finfo(np.float32).eps)

    def with_b(size):
        return trained(gradients={"b": Value(np.full(4, size), "float32")})

    assert first(with_b(0.1 * eps), with_b(-0.5 * eps), with_b(0.2 * eps)) is None
    assert first(with_b(0.1 * eps), with_b(8 * eps), with_b(0.2 * eps)) == ("gradient", "b")


def test_a_gradient_that_is_missing_or_no_number_is_wrong():
    nan = {"b": Value(np.full(4, np.nan, np.float32), "float32")}
    none, zeros = {"b": None}, {"b": Value(np.zeros(4, np.float32), "float32")}
    for other in (nan, none, zeros, {"b": Value(np.ones(3, np.float32), "float32")}):
        assert first(trained(), trained(gradients=other), trained()) == ("gradient", "b")
    assert first(trained(gradients=nan), trained(gradients=nan), trained(gradients=nan)) is None
    assert first(trained(gradients=none), trained(gradients=zeros), trained(gradients=zeros)) is None


def test_the_order_is_that_of_a_step():
    wrong = Value(np.full(4, 3.0, np.float32), "float32")
    right = Value(np.ones(4, np.float32), "float32")
    kinds = {"forward": "forward", "gradients": "gradient", "updates": "parameter", "buffers": "buffer"}
    whole = {part: {"x": right} for part in kinds}
    for part, kind in kinds.items():
        later = list(kinds)[list(kinds).index(part) :]
        tiled = trained(**whole | {name: {"x": wrong} for name in later})
        assert first(trained(**whole), tiled, trained(**whole)) == (kind, "x")


def test_the_module_whose_argument_is_right_comes_first():
    right, wrong = (Value(np.full(4, size, np.float32), "float32") for size in (1.0, 3.0))
    plain = {"forward": dict.fromkeys(("inner", "outer"), right), "given": dict.fromkeys(("inner", "outer"), right)}
    tiled = {"forward": dict.fromkeys(("inner", "outer"), wrong), "given": {"inner": wrong, "outer": right}}
    assert first(trained(**plain), trained(**tiled), trained(**plain)) == ("forward", "outer")


def test_hooks_run_as_often_or_once_a_micro_batch():
    once, twice = {"a": 1, "b": 1}, {"a": 2, "b": 2}
    assert first(trained(hooks=once), trained(hooks=twice), trained()) == ("hook", "a")
    assert first(trained(hooks=once), trained(hooks=twice), trained(), same_steps=False) is None
    once["c"], twice["c"] = 1, 8
    assert first(trained(hooks=once), trained(hooks=twice), trained(), same_steps=False) == ("hook", "c")


def test_the_coarsest_dtype():
    assert coarsest(["float32", "int64", "bfloat16", "float16"]) == "bfloat16"
    assert coarsest([]) == "float64"

"""Distillation of one head by another: every case in both halves against the float64 oracle, and every bad input."""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from shared_specs.config import NAMES, Half
from shared_specs.core.bad_case import BadCase
from shared_specs.core.rounding import DTYPES, Array, compute_dtype, relative_error
from shared_specs.distillation.bad_inputs import BAD_DISTILLATION_CASES, GOOD_DISTILLATION_SHAPES
from shared_specs.distillation.cases import (
    DISTILLATION_CASES,
    DistillationCase,
    evaluate_distillation,
    make_distillation_inputs,
)
from shared_specs.tolerances import limit
from tests.adapters import ADAPTERS
from tests.asserting import assert_within

HALVES: tuple[Half, ...] = ("torch", "jax")
OPERANDS = ("student", "w_student", "teacher", "w_teacher", "targets")


def loss_of(half: Half) -> Any:
    return import_module(NAMES[half].package).tiled_distillation_loss


@cache
def truth(case: DistillationCase) -> tuple[dict[str, Array], dict[str, float]]:
    """The oracle's results and the largest relative error each may show."""
    oracle, baseline = (evaluate_distillation(case, rounded=rounded) for rounded in (False, True))
    return oracle, {name: limit(relative_error(baseline[name], oracle[name]), case.dtype) for name in oracle}


def laid_out(half: Half, name: str, array: Array) -> Any:
    return ADAPTERS[half].from_numpy(np.ascontiguousarray(array.T) if name[0] == "w" and half == "torch" else array)


def run(half: Half, case: DistillationCase) -> dict[str, Any]:
    """The loss and the gradients of student, w_student and bias_student, in the specification's layout."""
    if half == "torch":
        return _run(half, case)
    import jax

    with jax.enable_x64(case.dtype == "float64"):
        return _run(half, case)


def _run(half: Half, case: DistillationCase) -> dict[str, Any]:
    arrays = make_distillation_inputs(case)
    given = {name: laid_out(half, name, array) for name, array in arrays.items()}
    upstream, moved = given.pop("dloss"), [name for name in arrays if name.endswith("student")]
    fn, adapter = loss_of(half), ADAPTERS[half]
    positional = [given.pop(name, None) for name in OPERANDS]
    if half == "torch":
        import torch

        named = dict(zip(OPERANDS, positional, strict=True)) | given
        leaves = [named[name].requires_grad_() for name in moved]
        value = fn(*positional, **given, **case.arguments)
        grads: Any = torch.autograd.grad(value, leaves, upstream)
    else:
        import jax

        def of(student: dict[str, Any]) -> Any:
            first = student["student"], student["w_student"]
            rest = given | ({"bias_student": student["bias_student"]} if "bias_student" in student else {})
            return fn(*first, *positional[2:], **rest, **case.arguments)

        named = dict(zip(OPERANDS, positional, strict=True)) | given
        value, pullback = jax.vjp(of, {name: named[name] for name in moved})
        found = pullback(upstream)[0]
        grads = [found[name] for name in moved]
    results = {"loss": adapter.to_numpy(value)}
    for name, gradient in zip(moved, grads, strict=True):
        array = adapter.to_numpy(gradient)
        results[f"d{name}"] = array.T if name[0] == "w" and half == "torch" else array
    return results


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", DISTILLATION_CASES, ids=lambda case: case.id)
def test_case(case: DistillationCase, half: Half) -> None:
    oracle, limits = truth(case)
    actual = run(half, case)
    assert set(actual) == set(oracle)
    for name, expected in oracle.items():
        dtype = compute_dtype(case.dtype) if name == "loss" else DTYPES[case.dtype]
        assert actual[name].dtype == dtype, name
        assert_within(actual[name], expected, limits[name], f"{case.id} {name}")


def test_the_oracle_differentiates_its_own_loss() -> None:
    """Central differences in float64, of one case that has everything."""
    case = next(case for case in DISTILLATION_CASES if case.kind == "jsd" and case.bias and case.reduction == "mean")
    from unittest.mock import patch

    from shared_specs.distillation import cases

    arrays = make_distillation_inputs(case)
    exact = evaluate_distillation(case, rounded=False)
    step = 1e-6
    for name, place in (("student", (1, 2, 3)), ("w_student", (4, 5)), ("bias_student", (6,))):
        values = []
        for sign in (1, -1):
            moved = arrays | {name: arrays[name].copy()}
            moved[name][place] += sign * step
            with patch.object(cases, "make_distillation_inputs", lambda _, moved=moved: moved):
                values.append(float(evaluate_distillation(case, rounded=False)["loss"]))
        slope = (values[0] - values[1]) / (2 * step)
        assert abs(slope - exact[f"d{name}"][place]) < 1e-7 * max(1.0, abs(slope))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", BAD_DISTILLATION_CASES, ids=lambda case: case.id)
def test_bad_input(case: BadCase, half: Half) -> None:
    given = {}
    for name, shape in (GOOD_DISTILLATION_SHAPES | case.shapes).items():
        if name == "targets":
            array = np.full(shape, case.target)
        else:
            array = np.ones(shape).astype(DTYPES[case.dtypes.get(name, "float32")])
        array = array.T if name in case.transposed else array
        given[name] = case.operands[name] if name in case.operands else laid_out(half, name, array)
    with pytest.raises(case.error) as caught:
        loss_of(half)(*given.values(), **case.arguments)
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])

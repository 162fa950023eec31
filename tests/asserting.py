"""The comparisons of the suite. Each is itself tested by mutants in tests/meta/test_asserting.py."""

from functools import cache
from typing import Any

import numpy as np

from shared_specs import reference
from shared_specs.config import LOSS_OUTPUTS
from shared_specs.core.rounding import DTYPES, compute_dtype, relative_error
from shared_specs.reference import Case
from shared_specs.tolerances import limit

Array = np.ndarray[Any, Any]


@cache
def truth(case: Case) -> tuple[dict[str, Array], dict[str, float]]:
    """The oracle's results and the largest relative error each may show."""
    oracle, baseline = reference.oracle(case), reference.baseline(case)
    return oracle, {name: limit(relative_error(baseline[name], oracle[name]), case.dtype) for name in oracle}


def assert_within(actual: Array | None, expected: Array, allowed: float, what: str) -> None:
    """Relative L2 distance of `actual` to `expected` at most `allowed`; None, NaN and other shapes never pass."""
    __tracebackhide__ = True
    if actual is None:
        raise AssertionError(f"{what}: got None instead of an array {expected.shape}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape} instead of {expected.shape}")
    if not np.isfinite(actual.astype(np.float64)).all() and np.isfinite(expected.astype(np.float64)).all():
        raise AssertionError(f"{what}: holds NaN or infinity")
    error = relative_error(actual, expected)
    if not error <= allowed:
        raise AssertionError(f"{what}: relative error {error:.3e}, allowed {allowed:.3e}")


def assert_near(actual: Any, expected: Any, what: str = "the values") -> None:
    """Two tensors of one dtype that hold the same few numbers, computed in two ways: at most its floor apart."""
    __tracebackhide__ = True
    if actual is None:
        raise AssertionError(f"{what}: got None")
    names = [str(each.dtype).removeprefix("torch.") for each in (actual, expected)]
    if names[0] != names[1]:
        raise AssertionError(f"{what}: dtype {names[0]} instead of {names[1]}")
    found, wanted = (each.detach().cpu().double().numpy() for each in (actual, expected))
    assert_within(found, wanted, limit(0.0, names[0]), what)


def assert_case(case: Case, actual: dict[str, Array | None]) -> None:
    """Every quantity of the case, no more and no less, in its dtype and within its limit.

    Gradients and y have the case's dtype; losses, their outputs and a router's logits are float32 (float64 for float64).
    """
    __tracebackhide__ = True
    oracle, limits = truth(case)
    if set(actual) != set(oracle):
        raise AssertionError(f"{case.id}: got {sorted(actual)} instead of {sorted(oracle)}")
    for name, expected in oracle.items():
        found = actual[name]
        dtype = compute_dtype(case.dtype) if name in ("loss", "logits", *LOSS_OUTPUTS) else DTYPES[case.dtype]
        if found is not None and found.dtype != dtype:
            raise AssertionError(f"{case.id} {name}: dtype {found.dtype} instead of {dtype}")
        assert_within(found, expected, limits[name], f"{case.id} {name}")

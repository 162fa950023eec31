"""Fixtures of the tests of the JAX half; tests/conftest.py loads them where JAX is."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from shared_specs.tolerances import FLOOR
from tests.asserting import assert_within
from tests.core.jax_compiling import compiled_once_a_session as compiled_once_a_session
from tiled_jax import backends


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 arrays, so that a comparison sees mistakes and not roundings."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def float64(x64: None) -> Iterator[None]:
    """`x64` for whole models: Flax's norms promote their float32 constants, which strict promotion refuses beside float64."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def same(x64: None) -> Any:
    """Asserts that two pytrees of float64 arrays are equal but for rounding."""

    def compare(actual: Any, expected: Any) -> None:
        actual_leaves, actual_tree = jax.tree.flatten(actual)
        expected_leaves, expected_tree = jax.tree.flatten(expected)
        assert actual_tree == expected_tree
        assert expected_leaves
        for index, pair in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
            a, b = (np.asarray(jax.device_get(leaf)) for leaf in pair)
            assert a.dtype == b.dtype == np.float64
            assert_within(a, b, FLOOR["float64"], f"leaf {index}")

    return compare


@pytest.fixture
def clean() -> Iterator[None]:
    """JAX's GPU interpreter without what an earlier test left in it, for tests of kernels."""
    from tests.kernels.jax_interpreted import clean_interpreter

    with clean_interpreter():
        yield


@pytest.fixture
def interpreting(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="pallas" is the interpreter."""
    monkeypatch.setenv(backends.INTERPRET, "1")

"""Zeros that a compiled program makes when something else is there, and not before."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiled_jax.core.loops import zeros_after
from tiled_jax.layers.embedding import nan_unless


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
@pytest.mark.parametrize("value", [0.0, -1.5, np.inf, np.nan], ids=str)
def test_zeros_whatever_they_come_after(dtype: Any, value: float) -> None:
    before = jnp.full((3, 2), 0 if dtype == jnp.int32 else value, dtype)
    for wanted in (jnp.float32, jnp.bfloat16):
        found = jax.jit(lambda a, wanted=wanted: zeros_after(a, (4, 5), wanted))(before)
        assert (found.shape, found.dtype) == ((4, 5), wanted)
        assert not np.any(np.asarray(found, np.float32))
    assert zeros_after(before[:0], (2,), jnp.float32).tolist() == [0, 0]


def test_the_compiled_zeros_read_what_they_come_after() -> None:
    """XLA knows no constant in their place, which it could make at any time."""
    text = jax.jit(lambda a: zeros_after(jnp.sin(a), (64, 8), jnp.float32)).lower(jnp.ones((3, 2))).compile().as_text()
    assert re.search(r"= f32\[64,8\]\S* (broadcast|fusion|call)\(%", text)
    assert "sine(" in text


def test_rows_that_are_not_known_hand_their_gradient_on() -> None:
    """NaN in front of it; `lookup`, which made the rows, leaves it out."""
    rows, known = jnp.ones((3, 2)), jnp.asarray([[True], [False], [True]])
    y, pull = jax.vjp(lambda rows: nan_unless(known, rows), rows)
    assert np.isnan(np.asarray(y)).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert np.array_equal(pull(2 * rows)[0], 2 * rows)
    text = str(jax.make_jaxpr(lambda d: pull(d))(rows))
    assert "broadcast_in_dim" not in text, "no zeros of all rows"

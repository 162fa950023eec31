"""Right ways of training in JAX, in every combination, of which `check` must not say that something differs."""

import jax
import pytest

from tests.check.jax_setups import EVERY
from tiled_jax import check


@pytest.mark.deep
@pytest.mark.parametrize("setup", EVERY, ids=str)
def test_a_right_training_is_equal(setup):
    with jax.numpy_dtype_promotion("standard"):  # on which optax and adapters rely
        report = check(**setup.arguments())
    assert report.equal, str(report)
    assert "tiled_mlp" in str(report.paths) or "tile: " in str(report.paths)

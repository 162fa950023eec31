"""Batches of grain, packed and labelled as it hands them out, train a tiled model as NumPy's do."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shared_specs.tolerances import MODEL_FLOAT32
from tests.trainers.test_jax_trainers import VOCAB, NnxModel

grain = pytest.importorskip("grain.python")


@pytest.fixture(autouse=True)
def promotion_of_users() -> Iterator[None]:
    """As in test_jax_trainers.py."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_batches_of_grain() -> None:
    rows = [np.random.default_rng(seed).integers(0, VOCAB, 13) for seed in range(8)]

    def labelled(ids: Any) -> tuple[Any, Any]:
        return ids[:-1].astype(np.int32), np.where(np.arange(12) < 3, -100, ids[1:]).astype(np.int32)

    loaded = grain.MapDataset.source(rows).shuffle(seed=3).map(labelled).batch(2, drop_remainder=True)

    def curve(tiled: bool) -> list[float]:
        model = NnxModel(tiled, nnx.Rngs(0))
        state = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        found = []
        for ids, targets in loaded:
            batch = jnp.asarray(ids), jnp.asarray(targets)
            loss, gradients = nnx.value_and_grad(lambda model, batch=batch: model(*batch))(model)
            state.update(model, gradients)
            found.append(float(loss))
        return found

    assert np.asarray(next(iter(loaded))[1]).dtype == np.int32
    found = curve(True)
    assert len(found) == 4
    assert jax.tree.all(jax.tree.map(np.isfinite, found))
    assert found == pytest.approx(curve(False), rel=MODEL_FLOAT32)

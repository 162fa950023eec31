"""`bench --op model` in JAX: its truth is float64 throughout, and every variant is measured."""

import re
from dataclasses import replace

import jax
import pytest

from shared_specs.app.bench.model_errors import tokens_of
from shared_specs.app.bench.workloads import ModelWorkload
from shared_specs.app.models.weights import ModelFiles, read_model, weight_shapes
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.tiny_model import write_tiny_folder
from tiled_jax.commands.bench import model

SMALL = ModelWorkload(name="small", tokens=24, reason="quick")
FLOATS = re.compile(r"\b(?:bf16|f16|f32|f64)\b")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_model(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def dtypes(files: ModelFiles, options: dict[str, object]) -> set[str]:
    """Return the floating-point dtypes in the program of the loss and its gradients."""
    function, parameters = model.loss_and_gradients(files, tokens_of(SMALL, files), options)
    return set(FLOATS.findall(str(jax.make_jaxpr(function)(parameters))))


@pytest.mark.deep
def test_the_truth_is_float64_throughout(files: ModelFiles) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert dtypes(files, model.TRUTH) == {"f64"}
    assert dtypes(files, {"plain": True}) == {"f32"}
    ids = tokens_of(SMALL, files)
    loss, gradients = model.truth_of(files, ids)
    assert {gradient.dtype.name for gradient in gradients.values()} == {"float64"}
    assert gradients.keys() == weight_shapes(files.config).keys()
    assert loss == pytest.approx(model.variants(files, ids)["plain"]()[0], rel=DEMO_LOSS_RTOL)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_variant_is_measured(files: ModelFiles, dtype: str) -> None:
    """Against a truth of the very weights that it computes with, so that of 16 bits the roundings of products are left."""
    rows = {row["variant"]: row for row in model.measure(replace(SMALL, dtype=dtype), source=str(files.source))}
    assert list(rows) == ["plain", "tiled", "tiled, scope block"]
    for row in rows.values():
        assert row["workload"] == "small"
        assert row["loss_error"] == abs(row["loss"] - row["loss_float64"]) / row["loss_float64"]
        assert 0 < row["gradients_error"] < row["worst_gradient_error"]
        assert (row["gradients_error"] > DEMO_LOSS_RTOL) == (dtype == "bfloat16")
        assert row["worst_gradient"].startswith("model.")

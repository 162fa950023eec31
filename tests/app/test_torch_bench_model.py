"""`bench --op model`: its truth is float64 throughout, every variant is measured, and another model would be noticed."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs.app.bench.model_errors import measure_model, tokens_of
from shared_specs.app.bench.workloads import ModelWorkload
from shared_specs.app.models.weights import read_model
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.tiny_model import write_tiny_folder
from tiled_torch.commands.bench import model
from tiled_torch.commands.finetune.trainer import build_model

SMALL = ModelWorkload(name="small", tokens=24, reason="quick")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def case(folder):
    files = read_model(folder)
    ids = torch.from_numpy(tokens_of(SMALL, files))
    return build_model(files.config, files.weights, torch.device("cpu")), ids


class Narrow(TorchDispatchMode):
    """Collects the operations that compute in float32."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.found.add(function.overloadpacket.__name__)
        return result


COPIES = {"clone", "detach", "new_empty", "set_", "_to_copy"}


@pytest.mark.deep
def test_the_truth_is_float64_but_for_the_angles_of_positions(case):
    given, ids = case
    with Narrow() as narrow:
        loss, gradients = model.truth_of(given, ids)
    assert narrow.found - COPIES == {"mul", "cat", "cos", "sin"}
    assert {gradient.dtype.name for gradient in gradients.values()} == {"float64"}
    assert gradients.keys() == {name for name, _ in given.named_parameters()}
    with Narrow() as narrow:
        plain = given(input_ids=ids, labels=ids).loss.item()
    assert {"mm", "rsqrt"} < narrow.found  # it sees them where they are
    assert loss == pytest.approx(plain, rel=DEMO_LOSS_RTOL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_variant_is_measured(folder, dtype):
    """Against a truth of the very weights that it computes with, so that of 16 bits the roundings of products are left."""
    rows = {row["variant"]: row for row in model.measure(replace(SMALL, dtype=dtype), source=folder)}
    assert list(rows) == ["plain", "tiled", "tiled, scope block"]
    for row in rows.values():
        assert row["workload"] == "small"
        assert row["loss_error"] == abs(row["loss"] - row["loss_float64"]) / row["loss_float64"]
        assert 0 < row["gradients_error"] < row["worst_gradient_error"]
        assert (row["gradients_error"] > DEMO_LOSS_RTOL) == (dtype == "bfloat16")
        assert row["worst_gradient"].startswith("model.")


def test_the_worst_gradient_is_named(case):
    truth = model.truth_of(*case)
    name = "model.layers.1.mlp.up_proj.weight"
    row = measure_model(SMALL, truth, {"off": lambda: (truth[0], truth[1] | {name: truth[1][name] * 1.001})})[0]
    assert (row["worst_gradient"], row["loss_error"]) == (name, 0)
    assert row["worst_gradient_error"] == relative_error(truth[1][name] * 1.001, truth[1][name])


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_another_model_is_noticed(case, factor):
    truth = model.truth_of(*case)
    for found in (
        (truth[0] * factor, truth[1]),
        (truth[0], truth[1] | {"model.norm.weight": truth[1]["model.norm.weight"] * factor}),
    ):
        with pytest.raises(RuntimeError, match=r"^bench: other does not compute the model's loss and gradients$"):
            measure_model(SMALL, truth, {"other": lambda found=found: found})

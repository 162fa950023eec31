"""`bench --op model` in both halves: their float64 is one, but for the angles of positions, float32 in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_specs.app.bench.model_errors import tokens_of
from shared_specs.app.bench.workloads import MODEL_WORKLOADS, ModelWorkload
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import BenchOptions
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32
from tests.tiny_model import write_tiny_folder
from tiled_jax.commands.bench import bench as bench_of_jax
from tiled_jax.commands.bench import model as of_jax
from tiled_torch.commands.bench import bench as bench_of_torch
from tiled_torch.commands.bench import model as of_torch
from tiled_torch.commands.finetune.trainer import build_model


@pytest.mark.deep
def test_both_truths_are_one(tmp_path: Path) -> None:
    files = read_model(write_tiny_folder(tmp_path / "tiny"))
    ids = tokens_of(ModelWorkload(name="small", tokens=24, reason="quick"), files)
    loss, gradients = of_jax.truth_of(files, ids)
    given = build_model(files.config, files.weights, torch.device("cpu"))
    expected_loss, expected = of_torch.truth_of(given, torch.from_numpy(ids))
    assert abs(loss - expected_loss) <= MODEL_FLOAT32 * expected_loss
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) <= MODEL_FLOAT32, name


@pytest.mark.parametrize(
    ("half", "command", "op"),
    [("torch", bench_of_torch, of_torch), ("jax", bench_of_jax, of_jax)],
    ids=["torch", "jax"],
)
def test_the_record(half: str, command: Any, op: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_specs.app.bench.bench.require_parity", lambda half, op: f"{half} {op}")
    monkeypatch.setattr(op, "measure", lambda workload, repeats: [{"variant": "x", "workload": workload.name}])
    options = BenchOptions(op="model", out=str(tmp_path))
    options.check()
    assert command.bench(options) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert (record["kind"], record["half"], record["parity"]) == ("model", f"tiled_{half}", f"{half} loss")
    assert record["results"] == [{"variant": "x", "workload": workload.name} for workload in MODEL_WORKLOADS]

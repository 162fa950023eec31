"""Trainers with a tiled model train what they train untiled: accelerate under FSDP2, a plain loop, transformers compiled."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32
from tests.models.test_torch_models import build
from tests.models.test_torch_trainer import trainer
from tests.ranks import Ranks
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.block.layer import BETWEEN


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp2_of_accelerate(pools: dict[int, Ranks], checkpointing: bool) -> None:
    """Parameters are in parts over the ranks, so that it is FSDP2 that ran, and the curve is that of one process."""
    for answer in pools[2].run("tests.trainers.ranks_torch_accelerate:both", checkpointing=checkpointing):
        assert set(answer["kinds"]) == {"DTensor"}
        assert set(answer["paths"].values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}
        assert answer["found"] == pytest.approx(answer["expected"], rel=MODEL_FLOAT32)
        assert answer["error"] <= MODEL_FLOAT32


def test_a_plain_loop_under_fsdp2(pools: dict[int, Ranks]) -> None:
    """By the lines of the page of trainers."""
    for answer in pools[2].run("tests.trainers.ranks_torch_loops:both"):
        assert answer["kinds"] == ["DTensor"]
        assert set(answer["paths"].values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}
        assert answer["found"] == pytest.approx(answer["expected"], rel=MODEL_FLOAT32)


class Paths(TrainerCallback):
    """What `tiling_paths` says after each step."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_step_end(self, *_: Any, **of_the_trainer: Any) -> None:
        self.found |= set(tiling_paths(of_the_trainer["model"]).values())


def compiled_training(model: nn.Module, folder: Path) -> tuple[list[float], set[str], int]:
    """What transformers.Trainer logs with `torch_compile=True`, evaluation included; the paths; how many graphs."""
    every_step: dict[str, Any] = {
        "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    torch.compiler.reset()
    counters.clear()
    paths = Paths()
    session = trainer(model, folder, every_step | compiled, {"callbacks": [paths]})
    session.train()
    names = ("loss", "grad_norm", "eval_loss", "eval_best", "eval_norm")
    logged = [row[name] for row in session.state.log_history for name in names if name in row]
    return logged, paths.found, counters["stats"]["unique_graphs"]


@pytest.mark.deep
@pytest.mark.parametrize(("scope", "path"), [("mlp", "tiled_mlp"), ("block", f"tiled_block{BETWEEN}")])
def test_torch_compile_of_the_trainer(scope: Any, path: str, tmp_path: Path) -> None:
    """The curve and the weights are the untiled model's, and nothing is said of a path that was not taken."""
    untiled, model = build("llama").float(), tile_model(build("llama").float(), scope=scope, num_shards=3)
    with warnings.catch_warnings(record=True) as told:  # torch.compile has warnings of its own
        warnings.simplefilter("always")
        expected, _, _ = compiled_training(untiled, tmp_path)
        found, paths, graphs = compiled_training(model, tmp_path)
    assert [str(one.message) for one in told if str(one.message).startswith("tile_model")] == []
    assert graphs > 0
    assert len(found) == 3 * 5
    assert found == pytest.approx(expected, rel=MODEL_FLOAT32)
    assert paths >= {path, "tiled_linear_cross_entropy"}
    assert all(one.startswith("tiled_") for one in paths)
    for ours, plain in zip(model.parameters(), untiled.parameters(), strict=True):
        assert relative_error(ours.detach().numpy(), plain.detach().numpy()) <= MODEL_FLOAT32

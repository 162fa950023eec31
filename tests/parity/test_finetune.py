"""The command of one half against that of the other: same windows, same losses, and one resumes what the other began."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shared_specs.app.log import read_log, step_records
from shared_specs.app.loop import MODEL_NAME, finetune
from shared_specs.app.weights import read_model
from shared_specs.cli import FinetuneOptions
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.tiny_model import write_text, write_tiny_folder
from tiled_jax import __main__ as jax_main
from tiled_jax.commands.finetune import JaxTrainer
from tiled_torch import __main__ as torch_main
from tiled_torch.commands.finetune import TorchTrainer

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_folder(folder / "model")
    write_tiny_folder(folder / "untied", tie_word_embeddings=False)
    write_text(folder / "text")
    return folder


def run(trainer, inputs, out, model="model", **changes):
    base = {"model": str(inputs / model), "text": str(inputs / "text"), "tokens": 48, "steps": STEPS, "batch": 2}
    options = FinetuneOptions(**base | {"lr": 1e-3, "out": str(out), "device": "cpu"} | changes)
    assert finetune(trainer(), options, Console(file=io.StringIO())) == 0
    return [record["loss"] for record in step_records(read_log(Path(out)))]


def test_commands_have_the_same_words_and_options():
    commands = [{c.name: (c.help, c.options) for c in half.COMMANDS} for half in (torch_main, jax_main)]
    assert commands[0] == commands[1]
    assert commands[0]["finetune"][1] is FinetuneOptions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model": "untied"}, marks=pytest.mark.slow),
        {"rope_scale": 2.0, "tokens": 100, "batch": 1},
        {"checkpointing": True},
    ],
    ids=str,
)
def test_same_losses_and_weights(inputs, tmp_path, changes):
    plain = run(TorchTrainer, inputs, tmp_path / "plain", plain=True, **changes)
    torch = run(TorchTrainer, inputs, tmp_path / "torch", num_shards=5, keep=0.5, **changes)
    jax = run(JaxTrainer, inputs, tmp_path / "jax", num_shards=5, keep=0.5, **changes)
    assert plain[-1] < plain[0]
    assert torch == pytest.approx(plain, rel=DEMO_LOSS_RTOL)
    assert jax == pytest.approx(plain, rel=DEMO_LOSS_RTOL)
    weights = [read_model(tmp_path / half / MODEL_NAME).tensors for half in ("torch", "jax")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert np.linalg.norm(weights[1][name] - weight) <= DEMO_LOSS_RTOL * np.linalg.norm(weight), name


@pytest.mark.parametrize(
    ("first", "second"), [(TorchTrainer, JaxTrainer), pytest.param(JaxTrainer, TorchTrainer, marks=pytest.mark.slow)]
)
def test_one_half_resumes_the_other(inputs, tmp_path, first, second):
    whole = run(first, inputs, tmp_path / "whole")
    begun = run(first, inputs, tmp_path / "run", steps=3)
    resumed = run(second, inputs, tmp_path / "run", resume=True)
    assert resumed[:3] == begun == whole[:3]
    assert resumed[3:] == pytest.approx(whole[3:], rel=DEMO_LOSS_RTOL)
    # Without the moments of the first three steps the fourth update would be another one.
    assert len(resumed) == STEPS

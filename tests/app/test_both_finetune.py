"""The command of one half against that of the other: same windows, same losses, and one resumes what the other began."""

import io
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shared_specs.app.finetune import loop
from shared_specs.app.finetune.checkpoint import load_checkpoint
from shared_specs.app.finetune.log import LOG_NAME, read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.errors import SpecError
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.core.jax_compiling import compiled_plainly, kept
from tests.launched import command
from tests.tiny_model import MIXTRAL, QWEN3_MOE, write_text, write_tiny_folder
from tiled_jax import __main__ as jax_main
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_torch import __main__ as torch_main
from tiled_torch.commands.finetune.trainer import TorchTrainer

STEPS = 6
TILED = {"num_shards": 5, "keep": 0.5}


@pytest.fixture(scope="module", autouse=True)
def _programs_are_not_optimized():
    with compiled_plainly():
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_folder(folder / "model")
    write_tiny_folder(folder / "untied", tie_word_embeddings=False)
    write_tiny_folder(folder / "qwen3_moe", **QWEN3_MOE)
    write_text(folder / "text")
    return folder


def run(trainer, inputs, out, model="model", **changes):
    base = {"model": str(inputs / model), "text": str(inputs / "text"), "tokens": 48, "steps": STEPS, "batch": 2}
    options = FinetuneOptions(**base | {"lr": 1e-3, "out": str(out), "device": "cpu"} | changes)
    assert finetune(trainer(), options, Console(file=io.StringIO())) == 0
    return losses(out)


def losses(out):
    return [record["loss"] for record in step_records(read_log(Path(out)))]


def test_commands_have_the_same_words_and_options():
    commands = [{c.name: (c.help, c.options) for c in half.COMMANDS} for half in (torch_main, jax_main)]
    assert commands[0] == commands[1]
    assert commands[0]["finetune"][1] is FinetuneOptions


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("trainer", "dtype", "kind"),
    [
        (TorchTrainer, "float32", "model"),
        (TorchTrainer, "bfloat16", "model"),
        (JaxTrainer, "float32", "model"),
        (JaxTrainer, "bfloat16", "model"),
        (TorchTrainer, "float32", "qwen3_moe"),
    ],
)
def test_least_budget_is_the_one_that_runs(inputs, tmp_path, monkeypatch, trainer, dtype, kind):
    """A smaller one is refused before anything is written, and would be refused by a layer in the first step."""

    def run_within(budget):
        return run(trainer, inputs, tmp_path / "run", kind, steps=1, dtype=dtype, memory_budget=budget)

    with pytest.raises(InputError, match=r"^finetune: --memory-budget must be >= \d+ bytes, .*, got 10\.") as caught:
        run_within(10)
    assert list(tmp_path.iterdir()) == []
    least = int(re.search(r">= (\d+)", str(caught.value))[1])
    assert len(run_within(least)) == 1
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(loop, "check_budget", lambda *_: None)
    with pytest.raises(SpecError, match=rf"memory_budget must be >= {least} bytes, one token at a time"):
        run_within(least - 1)


@pytest.fixture(scope="module")
def torch_run(inputs, tmp_path_factory):
    """The folder of PyTorch's tiled run without changes."""
    out = tmp_path_factory.mktemp("torch") / "run"
    run(TorchTrainer, inputs, out, **TILED)
    return out


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model": "untied"}, marks=pytest.mark.slow),
        {"rope_scale": 2.0, "tokens": 100, "batch": 1, "checkpointing": True},
    ],
    ids=str,
)
def test_same_losses_and_weights(inputs, torch_run, tmp_path, changes):
    plain = run(TorchTrainer, inputs, tmp_path / "plain", plain=True, **changes)
    if changes:
        torch_run = tmp_path / "torch"
        run(TorchTrainer, inputs, torch_run, **TILED, **changes)
    assert plain[-1] < plain[0]
    assert losses(torch_run) == pytest.approx(plain, rel=DEMO_LOSS_RTOL)
    jax = run(JaxTrainer, inputs, tmp_path / "jax", **TILED, **changes)
    assert jax == pytest.approx(plain, rel=DEMO_LOSS_RTOL)
    weights = [read_model(folder / MODEL_NAME).tensors for folder in (torch_run, tmp_path / "jax")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert np.linalg.norm(weights[1][name] - weight) <= DEMO_LOSS_RTOL * np.linalg.norm(weight), name


@pytest.mark.deep
def test_everything_but_attention_a_shard_at_a_time(inputs, torch_run, tmp_path):
    """And inputs in host memory, which on a CPU is the device's own."""
    options = {"num_shards": 3, "scope": "block", "offload": True}
    for name, trainer in (("torch", TorchTrainer), ("jax", JaxTrainer)):
        found = run(trainer, inputs, tmp_path / name, **options)
        assert found == pytest.approx(losses(torch_run), rel=DEMO_LOSS_RTOL)


@pytest.mark.deep
def test_each_half_resumes_the_other(inputs, torch_run, tmp_path):
    """Without the moments of the steps before, the first update of whoever continues would be another one."""
    whole, out = losses(torch_run), tmp_path / "run"
    begun = run(TorchTrainer, inputs, out, **TILED, steps=2)
    passed = run(JaxTrainer, inputs, out, **TILED, steps=4, resume=True)
    ended = run(TorchTrainer, inputs, out, **TILED, resume=True)
    assert ended[:2] == begun == whole[:2]
    assert ended[:4] == passed
    assert ended == pytest.approx(whole, rel=DEMO_LOSS_RTOL)
    assert len(ended) == STEPS


@pytest.mark.deep
@pytest.mark.parametrize("kind", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_each_half_resumes_the_experts_of_the_other(inputs, tmp_path, kind):
    """They are one parameter of several arrays in PyTorch and one of another layout in JAX; a checkpoint has each by itself."""
    shared = {"model": str(write_tiny_folder(tmp_path / "model", **kind)), "num_shards": 3}
    whole = run(TorchTrainer, inputs, tmp_path / "whole", steps=3, **shared)
    for steps, trainer in enumerate((TorchTrainer, JaxTrainer, TorchTrainer), 1):
        found = run(trainer, inputs, tmp_path / "run", steps=steps, resume=steps > 1, **shared)
    assert found == pytest.approx(whole, rel=DEMO_LOSS_RTOL)
    ours, theirs = (read_model(tmp_path / name / MODEL_NAME).tensors for name in ("run", "whole"))
    for name, weight in theirs.items():
        assert np.linalg.norm(ours[name] - weight) <= DEMO_LOSS_RTOL * np.linalg.norm(weight), name


def interrupted(half, inputs, out, number, **words):
    """The exit code of the command in a process of its own, after a signal at its third step or soon after it."""
    given = {"model": inputs / "model", "text": inputs / "text", "lr": 1e-3, "out": out, "device": "cpu"} | words
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    process = command(half, "finetune", *arguments, environment=kept())
    deadline = time.monotonic() + 120
    while not (out / LOG_NAME).exists() or len(losses(out)) < 3:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("half", "trainer"), [("tiled_torch", TorchTrainer), ("tiled_jax", JaxTrainer)])
def test_an_interrupted_run_resumes_with_the_same_losses(half, trainer, number, inputs, tmp_path):
    """Ctrl-C and a kill of the command itself, in the middle of its work."""
    words = {"tokens": 60, "steps": 24, "batch": 4, "save_every": 2, **TILED}
    code = interrupted(half, inputs, tmp_path / "run", number, **words)
    assert code == (128 + number if number == signal.SIGINT else -number)
    done = load_checkpoint(tmp_path / "run").record["step"]
    assert 2 <= done < 24
    whole = run(trainer, inputs, tmp_path / "whole", **words)
    assert run(trainer, inputs, tmp_path / "run", **words, resume=True) == whole
    assert (tmp_path / "run" / MODEL_NAME).exists()

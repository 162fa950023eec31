"""The JAX command: a tiny Llama trained, saved, resumed, in a process that has no PyTorch too."""

import gc
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from shared_specs.app.command import main
from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.checkpoint import load_checkpoint, save_sharded_checkpoint
from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.finetune.processes import ALONE, OutputError
from shared_specs.app.finetune.trainer import ADAMW
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions
from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError
from shared_specs.layers.host_memory import POOL_VARIABLE
from shared_specs.tolerances import DEMO_LOSS_RTOL, MODEL_FLOAT32
from tests.asserting import assert_within
from tests.core.jax_compiling import compiled_plainly
from tests.installed import run_with
from tests.models.test_jax_llama import loaded as load_model
from tests.synced import Renames, assert_synced_before_the_name, longest_file
from tests.tiny_model import tiny_config, tiny_weights, write_text, write_tiny_folder, write_tiny_gguf
from tiled_jax import backends
from tiled_jax.__main__ import COMMANDS
from tiled_jax.commands.finetune import trainer as finetune_trainer
from tiled_jax.commands.finetune.processes import make_room
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_jax.models import next_token_loss, to_hf

ROOT = Path(__file__).parents[2]
# Runs `python -m tiled_jax` with every import of PyTorch, and of what would bring it along, failing.
WITHOUT_TORCH = """
import importlib.abc, runpy, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "tiled_torch", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
try:
    import torch
except ImportError:
    pass
else:
    sys.exit("torch is not blocked")
sys.argv[0] = "tiled_jax"
runpy.run_module("tiled_jax", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_folder(folder / "model")
    write_tiny_gguf(folder / "model.gguf")
    write_text(folder / "text")
    return folder


def base(inputs: Path) -> dict[str, Any]:
    """Options that every run here shares."""
    paths = {"model": str(inputs / "model"), "text": str(inputs / "text")}
    return paths | {"tokens": 48, "steps": 4, "batch": 2, "lr": 1e-3, "device": "cpu"}


@pytest.fixture
def options(inputs: Path, tmp_path: Path) -> Any:
    def make(**changes: Any) -> FinetuneOptions:
        return FinetuneOptions(**base(inputs) | {"out": str(tmp_path / "run")} | changes)

    return make


def run(options: FinetuneOptions) -> list[float]:
    trainer = JaxTrainer()
    assert finetune(trainer, options, Console(file=io.StringIO())) == 0
    if options.grad_accumulation == 1:
        assert trainer._update._cache_size() == 1, "one program for all steps"
    return [record["loss"] for record in step_records(read_log(Path(options.out)))]


@pytest.fixture(scope="module", autouse=True)
def _programs_are_not_optimized() -> Iterator[None]:
    with compiled_plainly():
        yield


@pytest.fixture(scope="module")
def plain_losses(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the run of `options` without tiling."""
    out = str(tmp_path_factory.mktemp("plain") / "run")
    losses = run(FinetuneOptions(**base(inputs), out=out, plain=True))
    assert losses[-1] < losses[0]
    return losses


@pytest.fixture(scope="module")
def tiled_losses(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the run of `options` in five shards."""
    return run(FinetuneOptions(**base(inputs), out=str(tmp_path_factory.mktemp("tiled") / "run"), num_shards=5))


def windows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 272, size=(2, 49), dtype=np.int32)


def loaded(options: FinetuneOptions, **config: Any) -> JaxTrainer:
    trainer = JaxTrainer()
    trainer.load(tiny_config(**config), tiny_weights(tiny_config(**config)), options)
    return trainer


@pytest.mark.deep
@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_layers_of_a_long_step_are_told_of(options: Any, monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    """Each layer's forward, and its backward; of a short step, whose program would stay out of the cache, nothing."""
    told: list[tuple[str, int]] = []
    for least in (2 * 48 + 1, 2 * 48):
        monkeypatch.setattr(finetune_trainer, "LONG_STEP_TOKENS", least)
        trainer = loaded(options(scope=scope, num_shards=2), num_hidden_layers=3)
        trainer.watch(lambda phase, layers: told.append((phase, layers)))
        assert not told
        trainer.step(Batch.of_windows(windows()))
        jax.effects_barrier()
    assert sorted(told) == [("backward", 3)] * 3 + [("forward", 3)] * 3


def test_step_is_adamw_on_the_mean_cross_entropy(options: Any) -> None:
    """Against the update written out by hand."""
    trainer = loaded(options(plain=True))
    graph, parameters = load_model(tiny_config(), plain=True)
    tokens = jnp.asarray(windows())
    loss, gradients = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), tokens))(parameters)
    assert trainer.step(Batch.of_windows(windows())) == pytest.approx(float(loss), rel=MODEL_FLOAT32)
    state, before = trainer.state(), tiny_weights(tiny_config())
    assert state.optimizer["step"] == 1
    for name, gradient in to_hf(gradients).items():
        m, v = (1 - ADAMW.beta1) * gradient, (1 - ADAMW.beta2) * gradient**2
        step = (m / (1 - ADAMW.beta1)) / (np.sqrt(v / (1 - ADAMW.beta2)) + ADAMW.eps)
        assert_within(state.optimizer[f"m.{name}"], m, MODEL_FLOAT32, f"m of {name}")
        assert_within(state.optimizer[f"v.{name}"], v, MODEL_FLOAT32, f"v of {name}")
        # The difference of two weights has lost digits.
        assert_within(state.weights[name] - before[name], -1e-3 * step, 10 * MODEL_FLOAT32, f"update of {name}")


def test_state_goes_round(options: Any) -> None:
    first = loaded(options(plain=True))
    for seed in range(2):
        first.step(Batch.of_windows(windows(seed)))
    second = loaded(options(plain=True))
    second.load_state(first.state())
    for seed in range(2, 4):
        assert first.step(Batch.of_windows(windows(seed))) == second.step(Batch.of_windows(windows(seed)))
    for name, array in first.state().optimizer.items():
        np.testing.assert_array_equal(array, second.state().optimizer[name], err_msg=name)


def test_state_is_a_copy(options: Any) -> None:
    """The next step updates the parameters in the very memory they have, which a state must not see or hinder."""
    trainer = loaded(options(plain=True))
    trainer.step(Batch.of_windows(windows(0)))
    state = trainer.state()
    kept = {name: array.copy() for name, array in state.weights.items()}
    donated = jax.tree.leaves((trainer._parameters, trainer._optimizer))
    where = {leaf.unsafe_buffer_pointer() for leaf in donated if leaf.ndim > 1}
    trainer.step(Batch.of_windows(windows(1)))
    for name, array in state.weights.items():
        np.testing.assert_array_equal(array, kept[name], err_msg=name)
    assert all(leaf.is_deleted() for leaf in donated)
    now = jax.tree.leaves((trainer._parameters, trainer._optimizer))
    assert where == {leaf.unsafe_buffer_pointer() for leaf in now if leaf.ndim > 1}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "changes",
    [{"memory_budget": 100_000, "checkpointing": True}, {"shard_tokens": 7, "keep": 0.5}],
    ids=str,
)
def test_same_losses_as_plain(
    options: Any, plain_losses: list[float], tiled_losses: list[float], changes: dict[str, Any]
) -> None:
    for losses in (tiled_losses, run(options(**changes))):
        assert losses == pytest.approx(plain_losses, rel=DEMO_LOSS_RTOL / 10)


def test_options_reach_the_model(options: Any) -> None:
    chosen = loaded(options(shard_tokens=7, keep=0.5, checkpointing=True, dtype="bfloat16"))
    model = nnx.merge(chosen._graph, chosen._parameters)
    assert (model.layers.mlp.config.tiling.shard_tokens, model.layers.mlp.config.tiling.keep) == (7, 0.5)
    assert model.loss_tiling == Tiling(shard_tokens=7), "a loss keeps nothing"
    assert model.checkpointing
    assert model.dtype == model.layers.mlp.dtype == jnp.bfloat16


@pytest.mark.parametrize(("plain", "ran"), [(False, "xla"), (True, "nothing")])
def test_the_loss_is_tiled_unless_plain(options: Any, plain: bool, ran: str) -> None:
    trainer, tokens = loaded(options(plain=plain)), jnp.asarray(windows())
    backends.record_run("tiled_linear_cross_entropy", "nothing")
    jax.eval_shape(lambda p: next_token_loss(nnx.merge(trainer._graph, p), tokens), trainer._parameters)
    assert backends.last_run("tiled_linear_cross_entropy") == ran


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(
    options: Any, plain_losses: list[float], tmp_path: Path
) -> None:
    rounded = run(options(dtype="bfloat16"))
    assert rounded != plain_losses
    assert rounded == pytest.approx(plain_losses, rel=100 * DEMO_LOSS_RTOL)
    saved = read_model(tmp_path / "run" / MODEL_NAME).tensors["model.layers.0.mlp.up_proj.weight"]
    assert (saved.view(np.uint32) & 0xFFFF).any()  # more bits than a bfloat16 has


def test_the_saved_model_is_the_trained_one(options: Any, tmp_path: Path) -> None:
    trainer = JaxTrainer()
    finetune(trainer, options(rope_scale=2.0, tokens=100), Console(file=io.StringIO()))
    saved = read_model(tmp_path / "run" / MODEL_NAME)
    assert saved.config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    weights = trainer.state().weights
    assert saved.tensors.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(saved.tensors[name], array, err_msg=name)


@pytest.mark.deep
def test_resumed_run_has_the_losses_of_the_uninterrupted_one(options: Any, tiled_losses: list[float]) -> None:
    run(options(num_shards=5, steps=2))
    assert run(options(num_shards=5, resume=True)) == tiled_losses


def shards_of(options: Any) -> Any:
    """What saves the shards of a trainer that has taken a step into a checkpoint, as the loop does."""
    trainer = loaded(options(plain=True))
    trainer.step(Batch.of_windows(windows()))
    return partial(
        save_sharded_checkpoint,
        team=ALONE,
        shard_format=trainer.shard_format,
        save_shards=trainer.save_shards,
        write_rest=lambda folder: None,
    )


def test_shards_are_on_the_disk_before_their_folder_has_its_name(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, renames = shards_of(options), Renames(monkeypatch)
    folder = save(tmp_path, record={"step": 1})
    assert list(folder.rglob("ocdbt.process_0"))
    assert_synced_before_the_name(renames, folder)


def test_a_full_disk_loses_no_shards(options: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = shards_of(options)
    kept = save(tmp_path, record={"step": 1})
    with (
        longest_file(10_000),
        pytest.raises(OutputError, match=r"^finetune: --out cannot be written to: File too large"),
    ):
        save(tmp_path, record={"step": 2})
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]
    assert load_checkpoint(tmp_path).record["step"] == 1
    assert "Traceback" not in capfd.readouterr().err
    # Writes that nobody waits for would show a traceback each when the interpreter ends.
    assert not [o for o in gc.get_objects() if type(o) is CoroutineType and "orbax" in o.cr_code.co_filename]


@pytest.mark.deep
def test_experts_train_the_same_in_shards_and_micro_batches(options: Any, tmp_path: Path) -> None:
    """A context longer than the window; micro-batches go by a loss that any family has."""
    kind = {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 16}
    folder = write_tiny_folder(tmp_path / "mixtral", **kind)
    shared = {"model": str(folder), "steps": 2}
    plain = run(options(**shared, plain=True, out=str(tmp_path / "plain")))
    tiled = run(options(**shared, num_shards=3, batch=1, grad_accumulation=2, out=str(tmp_path / "tiled")))
    assert tiled == pytest.approx(plain, rel=DEMO_LOSS_RTOL)
    expected, found = (read_model(tmp_path / name / "model").tensors for name in ("plain", "tiled"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert_within(found[name], weight, DEMO_LOSS_RTOL, name)


@pytest.mark.parametrize(("given", "processes", "expected"), [(None, 1, "89"), (None, 2, "64"), ("7", 1, "7")])
def test_offloaded_inputs_have_room_in_the_pool(
    options: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, processes: int, expected: str
) -> None:
    """Layers' inputs in float32 and a tenth, of this process, unless the environment says how large the pool is."""
    monkeypatch.setenv(POOL_VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(POOL_VARIABLE)
    if processes > 1:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(processes))
    chosen = options(tokens=2**20, batch=320)
    config = read_model(chosen.model).config
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 32)
    make_room(chosen)
    assert os.environ[POOL_VARIABLE] == expected


def test_device_that_is_not_here_is_refused(options: Any, tmp_path: Path) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("JAX sees a GPU here")
    with pytest.raises(UnsupportedError, match=r"^finetune: --device must be cpu or auto here, got gpu"):
        run(options(device="gpu"))
    assert not (tmp_path / "run").exists()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XLA_FLAGS": "", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    start = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, "finetune"]
    return subprocess.run([*start, *words], cwd=ROOT, text=True, capture_output=True, env=environment)


@pytest.mark.slow  # make test-new-jax has no torch at all
def test_the_command_runs_where_torch_cannot_be_imported(inputs: Path, tmp_path: Path) -> None:
    words = ["--model", str(inputs / "model.gguf"), "--text", str(inputs / "text"), "--out", str(tmp_path / "run")]
    words += ["--tokens", "40", "--steps", "2", "--num-shards", "3", "--device", "cpu"]
    done = command(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 2/2  loss " in done.stdout
    assert read_model(tmp_path / "run" / MODEL_NAME).tensors
    again = command(*words)
    assert again.returncode == 2
    assert again.stderr.startswith("finetune: --out must be a new or empty folder")


def test_a_missing_package_is_one_line_that_names_what_is_enough() -> None:
    done = run_with("jax", "tiled_jax", "finetune")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr == (
        "tiled_jax: the package typer is not installed. Install it with pip install 'tiled-mlp[cli,jax]'.\n"
    )


@pytest.mark.slow  # make test-new-jax has these extras and no others
def test_the_extras_that_a_message_names_are_enough(inputs: Path, tmp_path: Path) -> None:
    words = ["--model", str(inputs / "model"), "--text", str(inputs / "text"), "--out", str(tmp_path / "run")]
    done = run_with("cli,jax", "tiled_jax", "finetune", *words, "--tokens", "40", "--steps", "1", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_it_cannot_do_is_one_line_and_exit_code_2(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_folder(tmp_path / "other", hidden_act="sillu")
    words = ["--model", str(folder), "--text", str(inputs / "text"), "--out", str(tmp_path / "run"), "--tokens", "40"]
    assert main("tiled_jax", COMMANDS, ["finetune", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "hidden_act must be one of silu, " in shown
    assert "got 'sillu'" in shown
    assert not (tmp_path / "run").exists()

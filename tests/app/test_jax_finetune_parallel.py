"""`tiled_jax finetune --dp --fsdp --cp --tp`: the losses of one device, on virtual devices and in two processes; any of them
continues what any other began."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError, flag
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.asserting import assert_within
from tests.core.jax_compiling import compiled_plainly, xla_flags_with
from tests.loading import assert_no_whole_model, write_big
from tests.tiny_model import write_chat, write_text, write_tiny_folder
from tiled_jax.commands.finetune.trainer import JaxTrainer

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _programs_are_not_optimized() -> Iterator[None]:
    with compiled_plainly():
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_folder(folder / "model", tie_word_embeddings=False)
    write_text(folder / "text")
    return folder


def base(inputs: Path, out: Path) -> dict[str, Any]:
    paths = {"model": str(inputs / "model"), "text": str(inputs / "text"), "out": str(out)}
    return paths | {"tokens": 24, "steps": STEPS, "batch": 4, "lr": 1e-3, "device": "cpu", "num_shards": 3}


def run(inputs: Path, out: Path, **changes: Any) -> list[float]:
    options, trainer = FinetuneOptions(**base(inputs, out) | changes), JaxTrainer()
    assert finetune(trainer, options, Console(file=io.StringIO())) == 0
    program: Any = trainer._update if trainer._plan is None else trainer._plan.step.compiled
    assert program._cache_size() == 1, "one program for all steps"
    return losses(out)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in step_records(read_log(out))]


def saved(out: Path) -> dict[str, np.ndarray]:
    return read_model(out / MODEL_NAME).tensors


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    found = run(inputs, out)
    assert found[-1] < found[0]
    return out


def assert_same_run(out: Path, alone: Path) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=DEMO_LOSS_RTOL)
    expected = saved(alone)
    assert saved(out).keys() == expected.keys()
    for name, weight in saved(out).items():
        assert_within(weight, expected[name], DEMO_LOSS_RTOL, name)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"dp": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "plain": True, "num_shards": None}, marks=pytest.mark.slow),
        pytest.param({"cp": 4, "checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "plain": True, "num_shards": None}, marks=pytest.mark.slow),
        {"dp": 2, "fsdp": 2, "tp": 2},
        {"cp": 4, "tp": 2, "context": "2d"},
        {"fsdp": 2, "tp": 2, "scope": "block"},
        pytest.param({"cp": 2, "tp": 2, "scope": "block"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_same_losses_and_weights_on_many_devices(
    inputs: Path, alone: Path, tmp_path: Path, ranks: dict[str, Any]
) -> None:
    run(inputs, tmp_path / "run", **ranks)
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.deep
def test_a_step_of_a_qwen3_by_blocks(tmp_path: Path) -> None:
    """Whose heads are normed: as with its MLPs alone in shards, on one device and on four."""
    write_tiny_folder(tmp_path / "model", model_type="qwen3")
    write_text(tmp_path / "text")
    run(tmp_path, tmp_path / "mlp", steps=1)
    runs: dict[str, dict[str, int]] = {"block": {}, "split": {"fsdp": 2, "cp": 2}}
    for name, ranks in runs.items():
        run(tmp_path, tmp_path / name, steps=1, scope="block", **ranks)
        assert_same_run(tmp_path / name, tmp_path / "mlp")
    before, after = (read_model(tmp_path / place).tensors for place in ("model", f"block/{MODEL_NAME}"))
    trained = [name for name in before if "q_norm" in name or "k_norm" in name]
    assert len(trained) == 4
    assert not any(np.array_equal(before[name], after[name]) for name in trained)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "ranks"), [("gemma2", {"fsdp": 2, "cp": 2, "tp": 2}), ("phi3", {"fsdp": 2, "cp": 2, "context": "ring"})]
)
def test_a_step_by_blocks_of_layers_with_windows_that_cut(kind: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    """On devices that share a sequence, as one device computes it without tiling; fused projections have no --tp."""
    write_tiny_folder(tmp_path / "model", model_type=kind, sliding_window=16)
    write_text(tmp_path / "text")
    run(tmp_path, tmp_path / "alone", steps=1, plain=True, num_shards=None)
    run(tmp_path, tmp_path / "run", steps=1, scope="block", **ranks)
    assert_same_run(tmp_path / "run", tmp_path / "alone")
    if kind == "phi3":
        with pytest.raises(
            UnsupportedError, match=r"^parallelize: config\.tensor must be None where projections are fused"
        ):
            run(tmp_path, tmp_path / "split", steps=1, tp=2)


@pytest.mark.deep
def test_packed_conversations_in_micro_batches(tmp_path: Path) -> None:
    """Of what the assistant says each device has as much as there is: the mean is over all of it, as on one."""
    folder = write_chat(tmp_path / "inputs")
    shared = {"text": None, "chat": str(folder / "chat"), "tokens": 64, "batch": 4, "pack": True}
    run(folder, tmp_path / "alone", **shared)
    run(folder, tmp_path / "run", **shared | {"batch": 2}, grad_accumulation=2, fsdp=2, cp=2)
    assert_same_run(tmp_path / "run", tmp_path / "alone")


@pytest.mark.deep
def test_a_run_continues_on_other_devices(inputs: Path, alone: Path, tmp_path: Path) -> None:
    run(inputs, tmp_path / "run", steps=1, fsdp=4)
    run(inputs, tmp_path / "run", steps=2, resume=True, cp=2, tp=2)
    run(inputs, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ({"dp": 3, "batch": 3, "fsdp": 3}, InputError, r"--batch must be a multiple of 9"),
        (
            {"dp": 4, "tp": 4},
            InputError,
            r"^finetune: --dp x --fsdp x --cp x --tp must be 8, the devices of this run, got 4 x 1 x 1 x 4",
        ),
        ({"tp": 4}, SpecError, r"num_key_value_heads must be a multiple of the 4 ranks"),
        ({"cp": 5}, InputError, r"^finetune: --tokens must be a multiple of 5, got 24\."),
        (
            {"cp": 4, "tp": 2},
            SpecError,
            r"num_attention_heads must be a multiple of the 8 ranks of the mesh axes tp, cp",
        ),
        ({"fsdp": 3, "batch": 3}, SpecError, r"must be a multiple of the 3 devices of the mesh axes dp_shard"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused_before_anything_is_written(
    inputs: Path, tmp_path: Path, ranks: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert jax.device_count() == 8
    with pytest.raises(error, match=message):
        run(inputs, tmp_path / "run", **ranks)
    assert not (tmp_path / "run").exists()


def in_processes(inputs: Path, out: Path, *words: str, devices: int = 2) -> None:
    """The command in two processes of so many virtual devices each."""
    options = {name.replace("_", "-"): value for name, value in base(inputs, out).items()}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    started(["tiled_jax", "finetune", *given, "--group-timeout", "120", *words], devices)


def started(words: list[str], devices: int) -> list[str]:
    """What a module shows, run in two processes of so many virtual devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for rank in range(2):
        environment = os.environ | {
            **xla_flags_with(xla_force_host_platform_device_count=devices),
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
        }
        command = [sys.executable, "-m", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True, env=environment, **pipes))
    shown = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, output + errors
            shown.append(output)
    finally:
        for process in processes:
            process.kill()
    return shown


@pytest.mark.deep
@pytest.mark.parametrize(("axis", "gguf"), [("fsdp", False), pytest.param("tp", True, marks=pytest.mark.slow)])
def test_no_process_holds_the_whole_model_while_it_loads(inputs: Path, tmp_path: Path, axis: str, gguf: bool) -> None:
    first = base(inputs, tmp_path / "run") | {axis: 2}  # what is made once is no part of the weights
    big = first | {"model": str(write_big(tmp_path, gguf))}
    for shown in started(["tests.app.ranks_jax_loading", json.dumps(first), json.dumps(big)], devices=1):
        # XLA's threads keep 0.15 to 0.35 of it, by how busy the machine is; with the other part it would be 0.65 and more.
        assert_no_whole_model(**json.loads(shown.splitlines()[-1]), beside=0.45)


@pytest.mark.deep
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "cp": 2},
        pytest.param({"dp": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_and_their_checkpoint(inputs: Path, tmp_path: Path, axes: dict[str, int]) -> None:
    """Two processes of two devices begin, write shards, and one process of other devices continues: its warm-up too."""
    training = {"warmup": 2, "clip": 0.5, "weight_decay": 0.5, "eval_fraction": 0.2}
    alone = tmp_path / "alone"
    run(inputs, alone, **training)
    words = [word for name, value in (axes | training).items() for word in (flag(name), str(value))]
    in_processes(inputs, tmp_path / "run", "--steps", "2", *words)
    (step,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert not (step / "model.safetensors").exists(), "the state is in shards"
    run(inputs, tmp_path / "run", resume=True, tp=2, **training)
    assert_same_run(tmp_path / "run", alone)
    found, expected = (step_records(read_log(out), "eval") for out in (tmp_path / "run", alone))
    held_out = [{record["step"]: record["loss"] for record in records} for records in (found, expected)]
    assert held_out[0].pop(2) < held_out[0][0], "the end of what two processes did"
    assert held_out[0] == pytest.approx(held_out[1], rel=DEMO_LOSS_RTOL)

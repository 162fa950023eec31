"""Several processes of `tiled_jax finetune`: how they are found, and what happens when one of them is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from shared_specs.app.finetune.checkpoint import newest_checkpoint
from shared_specs.app.finetune.log import LOG_NAME
from shared_specs.app.finetune.processes import ALONE
from shared_specs.app.options import FinetuneOptions, InputError
from tests.tiny_model import write_text, write_tiny_folder
from tiled_jax.commands.finetune import processes

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
TIMEOUT, SAVE_EVERY = 20, 100
DESCRIBED = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def options(**changes: Any) -> FinetuneOptions:
    return FinetuneOptions(
        model="model", text="text", out="out", tokens=8, group_timeout=TIMEOUT, device="cpu", **changes
    )


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `jax.distributed.initialize` was called with; nothing is joined, no launcher started this process."""
    for name in (*DESCRIBED, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    return calls


def test_a_process_by_itself(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert processes.join(options()) is ALONE
    assert not joined


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        (DESCRIBED, {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1}),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}),
        (
            DESCRIBED | {"SLURM_STEP_NUM_TASKS": "4"},
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1},
        ),
    ],
    ids=["described", "slurm", "open mpi", "described under slurm"],
)
def test_processes_that_the_environment_describes(
    variables: dict[str, str], where: dict[str, Any], joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processes.join(options())
    timeouts = {"initialization_timeout": TIMEOUT, "heartbeat_timeout_seconds": TIMEOUT}
    assert joined == [where | timeouts]


def test_tasks_that_jax_does_not_find_are_not_as_many_runs(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(**_: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setenv("PMI_SIZE", "8")
    with pytest.raises(
        InputError, match=r"^finetune: PMI_SIZE says 8 processes, which JAX cannot find .*JAX_COORDINATOR"
    ):
        processes.join(options())


def test_numbers_that_are_none(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (DESCRIBED | {"JAX_PROCESS_ID": "one"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InputError, match=r"^finetune: JAX_PROCESS_ID must be a number beside JAX_COORDINATOR_ADDRESS, got"
    ):
        processes.join(options())


def free_job() -> int:
    """The number of a Slurm job whose port, as `jax.distributed.initialize` derives it, is free."""
    for job in range(4096):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", 65535 - 4096 + 1 + job)):
                return job
    raise AssertionError("no free port")


def start(folder: Path, rank: int, job: int) -> "subprocess.Popen[str]":
    """One of two tasks of a job step of Slurm, with one virtual device."""
    step = {"NODELIST": "localhost", "NUM_NODES": "1", "NUM_TASKS": "2"}
    slurm = {"SLURM_JOB_ID": job, "SLURM_NTASKS": 2, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    slurm |= {f"SLURM_STEP_{name}": value for name, value in step.items()}
    environment = os.environ | {name: str(value) for name, value in slurm.items()}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    given = {"model": folder / "model", "text": folder / "text", "out": folder / "run", "tokens": 8, "steps": 5000}
    given |= {"batch": 2, "device": "cpu", "num-shards": 2, "dp": 2, "save-every": SAVE_EVERY, "group-timeout": TIMEOUT}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tiled_jax", "finetune", *words]
    with (folder / f"shown-{rank}").open("w") as shown:
        return subprocess.Popen(command, cwd=ROOT, text=True, env=environment, stdout=shown, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path, victim: int) -> None:
    write_tiny_folder(tmp_path / "model")
    write_text(tmp_path / "text")
    job = free_job()
    started = [start(tmp_path, rank, job) for rank in range(2)]
    shown = [tmp_path / f"shown-{rank}" for rank in range(2)]
    log, survivor = tmp_path / "run" / LOG_NAME, started[1 - victim]
    try:
        deadline = time.monotonic() + 200
        while not log.exists() or log.read_text().count('"loss"') < SAVE_EVERY + 5:  # between two checkpoints
            assert all(process.poll() is None for process in started), [file.read_text() for file in shown]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started[victim].send_signal(signal.SIGKILL)
        survivor.wait(TIMEOUT + 30)
    finally:
        for process in started:
            process.kill()
            process.wait()
    text = shown[1 - victim].read_text()
    assert survivor.returncode not in (0, None), text
    assert newest_checkpoint(tmp_path / "run") is not None
    if victim == 1:
        message = f"finetune: process {1 - victim} of 2 lost another one, and the run ends: "
        assert message in text
        assert str(newest_checkpoint(tmp_path / "run")) in text

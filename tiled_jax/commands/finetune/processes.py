"""The devices and processes of a run of `finetune`: who they are, how they are joined, and the mesh that they make."""

import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shared_specs.app.finetune.processes import ALONE, Team, check_layout, end_alone, layout
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.config import ParallelConfig
from shared_specs.errors import UnsupportedError
from shared_specs.layers.host_memory import POOL_VARIABLE, pool_bytes, pool_gib

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# The number of processes, where a launcher started them: Slurm's srun, Open MPI, and what has PMI.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# What gloo and the coordination service say of a process that is gone.
_GONE = ("connection", "gloo", "coordination", "deadline", "unavailable", "heartbeat", "timeout", "timed out")


class Processes:
    """The team of a run in several processes, over JAX's own collectives."""

    some_lost = False  # of all teams of this process: it has one

    def __init__(self) -> None:
        self.rank, self.count = jax.process_index(), jax.process_count()

    def gather(self, value: Any) -> list[Any]:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        found = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(found, sizes, strict=True)]

    def lost(self, error: BaseException) -> str | None:
        for found in _chain(error):  # Orbax puts errors of its own around them
            text = str(found)
            told = text.lower()
            # The type goes by the status that XLA gives the error; gloo's own words tell by themselves.
            if "gloo" in told or (
                isinstance(found, jax.errors.JaxRuntimeError) and any(word in told for word in _GONE)
            ):
                Processes.some_lost = True
                return text
        return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def join(options: FinetuneOptions) -> Team:
    """Return the processes that the environment describes, once the options fit their devices.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID make this process one of several.
    Without them the tasks of a job step (srun) are, as `jax.distributed.initialize` finds them.
    """
    if _ADDRESS in os.environ:
        _initialize(options, **_described())
    elif (tasks := _tasks()) is not None:
        _initialize_by_cluster(options, *tasks)
    devices = devices_of(options.device)
    if jax.process_count() > 1:
        check_layout(options, len(devices), "devices", "Every device of every process takes part.")
        return Processes()
    if options.ranks > len(devices):
        advice = "XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU."
        check_layout(options, len(devices), "devices", advice)
    return ALONE


def _described() -> dict[str, Any]:
    """Return arguments of `jax.distributed.initialize` from the variables."""
    numbers = []
    for name in _NUMBERS:
        text = os.environ.get(name, "")
        if not text.isdecimal():
            raise InputError(f"finetune: {name} must be a number beside {_ADDRESS}, got '{text}'.")
        numbers.append(int(text))
    return {"coordinator_address": os.environ[_ADDRESS], "num_processes": numbers[0], "process_id": numbers[1]}


def make_room(options: FinetuneOptions) -> None:
    """Let JAX's pool of pinned memory become as large as layers' inputs need, unless the environment says how large.

    Before JAX starts, which reads it then. Between layers all is float32; over --tp every device has the whole.
    """
    config = read_model(options.model).config
    elements = config["num_hidden_layers"] * config["hidden_size"] * options.batch * options.tokens * options.tp
    _, tasks = _tasks() or ("", 1)
    processes = _described()["num_processes"] if _ADDRESS in os.environ else tasks
    os.environ.setdefault(POOL_VARIABLE, str(max(pool_gib(4 * elements // processes), pool_bytes() // 2**30)))


def _tasks() -> tuple[str, int] | None:
    """Return the launcher that started this process with others, and how many they are."""
    counts = ((name, os.environ.get(name, "")) for name in _TASKS)
    return next(((name, int(text)) for name, text in counts if text.isdecimal() and int(text) > 1), None)


def _initialize_by_cluster(options: FinetuneOptions, name: str, count: int) -> None:
    """Each task alone would train the same model and write the same folder."""
    try:
        _initialize(options)
    except ValueError as error:
        advice = f"Set {_ADDRESS}, {' and '.join(_NUMBERS)} for each of them."
        raise InputError(
            f"finetune: {name} says {count} processes, which JAX cannot find ({error}). {advice}"
        ) from error


def _initialize(options: FinetuneOptions, **where: Any) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = ("initialization_timeout", "heartbeat_timeout_seconds")
    jax.distributed.initialize(**where, **dict.fromkeys(timeouts, options.group_timeout))


def leave() -> None:
    """Give the other processes up; where one is lost, or this one fails by itself, end it at once.

    JAX's client would wait for the others until the timeout, at the interpreter's end as well, and then abort.
    """
    if not jax.distributed.is_initialized():
        return
    end_alone(Processes.some_lost)
    jax.distributed.shutdown()


def devices_of(name: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Return all devices of a kind, of every process."""
    if name == "auto":
        return jax.devices()
    try:
        return jax.devices(name)
    except RuntimeError as error:
        advice = "JAX sees no such device."
        raise UnsupportedError(f"finetune: --device must be cpu or auto here, got {name}. {advice}") from error


def mesh_and_config(options: FinetuneOptions, heads: int) -> tuple[jax.sharding.Mesh, ParallelConfig]:
    """Return the devices as a mesh, and what `parallelize` does along each of its axes. heads: of the model's queries."""
    axes, config = layout(options, heads, compiled=True)
    devices = np.asarray(devices_of(options.device)[: options.ranks]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)), config

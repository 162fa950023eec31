"""Checkpoints that every process writes its own part of, and any number of devices reads: Orbax."""

import gc
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CoroutineType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

_NAME, _COUNT = "state", "count"
_PATIENCE = 20  # seconds for writes that are under way when one fails
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")  # in the text of TensorStore's errors


def save(folder: Path, states: Mapping[str, nnx.State], count: jax.Array) -> None:
    """Write the states, by name, and the number of updates done, into a new folder below `folder`; all processes call it.

    Raises:
        OSError: this process could not write.
    """
    tree = {name: nnx.to_pure_dict(state) for name, state in states.items()} | {_COUNT: count}
    refused = None
    try:
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / _NAME, tree)
    except Exception as error:
        refused = _OS_ERROR.search(str(error))
        if refused is None:
            raise
        traceback.clear_frames(error.__traceback__)  # a thread of Orbax keeps the error, and its frames the writes
        error.__traceback__ = None
    if refused is not None:
        _forget()
        raise OSError(int(refused[1]), os.strerror(int(refused[1])))


def _forget() -> None:
    """Collect the writes that were under way, which else show a traceback each when the interpreter ends; some end later."""
    logger, shown = logging.getLogger("asyncio"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    patience = time.monotonic() + _PATIENCE
    try:
        gc.collect()
        while any(map(_is_write, gc.get_objects())) and time.monotonic() < patience:
            time.sleep(0.05)
            gc.collect()
    finally:
        sys.unraisablehook = shown
        logger.setLevel(level)


def _is_write(found: object) -> bool:
    return type(found) is CoroutineType and "orbax" in found.cr_code.co_filename


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracebacks of an error that Orbax raises as well: of its threads, and of writes that end after it."""
    logger, shown = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda told: None if "Event loop is closed" in str(told.exc_value) else shown(told)
    try:
        yield
        sys.unraisablehook = shown  # after an error it stays: nobody waits for the writes that are under way
    finally:
        logger.setLevel(level)


def load(folder: Path, like: Mapping[str, nnx.State]) -> tuple[dict[str, nnx.State], int]:
    """Return what `save` wrote, placed as `like` (of jax.ShapeDtypeStruct with shardings) says, whatever devices wrote it."""
    somewhere = jax.tree.leaves(like)[0].sharding
    whole = somewhere if len(somewhere.device_set) == 1 else NamedSharding(somewhere.mesh, PartitionSpec())
    tree: dict[str, Any] = {name: nnx.to_pure_dict(state) for name, state in like.items()}
    tree[_COUNT] = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder.resolve() / _NAME, tree)
    count = int(found.pop(_COUNT))
    states = {}
    for name, values in found.items():
        state = jax.tree.map(lambda a: a, like[name])
        nnx.replace_by_pure_dict(state, values)
        states[name] = state
    return states, count

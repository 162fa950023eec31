"""Checkpoints that every process writes its own part of, and any number of devices reads: Orbax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

_NAME, _COUNT = "state", "count"


def save(folder: Path, states: Mapping[str, nnx.State], count: jax.Array) -> None:
    """Write the states, by name, and the number of updates done, into a new folder below `folder`; all processes call it."""
    tree = {name: nnx.to_pure_dict(state) for name, state in states.items()} | {_COUNT: count}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / _NAME, tree)


def load(folder: Path, like: Mapping[str, nnx.State]) -> tuple[dict[str, nnx.State], int]:
    """What `save` wrote, placed as `like` (of jax.ShapeDtypeStruct with shardings) says, whatever devices wrote it."""
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

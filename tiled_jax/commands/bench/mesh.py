"""`bench --op mesh` in JAX: an MLP of tokens sharded over eight devices, plain and tiled, under `jit` and `shard_map`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.app.bench.bench import Rows
from shared_specs.app.bench.workloads import MESH_WORKLOADS, MeshWorkload
from shared_specs.app.options import InputError
from shared_specs.config import Tiling
from tiled_jax import tiled_mlp
from tiled_jax.commands.bench.peers import MLP, OF_MLP, PACKAGES, measure_programs, plain, temp_bytes, y_and_gradients

__all__ = ["PACKAGES", "check_devices", "facts", "measure", "variants"]
AXES = ("data", "fsdp")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def facts() -> dict[str, Any]:
    return {"device": f"{jax.device_count()} x {jax.devices()[0].device_kind}"}


def check_devices() -> None:
    """Raise InputError where there are fewer than the workloads need."""
    wanted = max(workload.devices for workload in MESH_WORKLOADS)
    if jax.device_count() < wanted:
        advice = f"On a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
        raise InputError(f"bench: --op mesh needs {wanted} devices, got {jax.device_count()}. {advice}")


def measure(workload: MeshWorkload, repeats: int) -> Rows:
    """Return one result a variant: time, temporary bytes of a device, collectives of the program; all compute the same."""
    mesh = jax.make_mesh((workload.devices // 2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        fns = {name: y_and_gradients(fn) for name, fn in variants(workload).items()}
        arguments = _arguments(workload, mesh)
        return measure_programs(workload, workload.shards, fns, arguments, OF_MLP, repeats, of_program)


def variants(workload: MeshWorkload) -> dict[str, MLP]:
    """Name -> the MLP as a function of x [B, S, H] and its three weights."""
    own = workload.sequences * workload.tokens // workload.devices
    tiling = Tiling(shard_tokens=own // workload.shards)
    named = Tiling(shard_tokens=own // workload.shards, token_axes=(AXES,))
    tiled = partial(tiled_mlp, tiling=tiling)
    found: dict[str, MLP] = {"plain": plain, "tiled": tiled, "tiled-token-axes": partial(tiled_mlp, tiling=named)}
    if not workload.sharded_weights:  # a map over the tokens that the caller writes has whole weights
        whole = (P(AXES), P(), P(), P())
        found["tiled-in-shard-map"] = jax.shard_map(tiled, in_specs=whole, out_specs=P(AXES))
    return found


def of_program(name: str, program: Any) -> dict[str, Any]:
    """Return temporary bytes of a device, and how often each kind of collective stands in the program."""
    text = program.as_text()
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in COLLECTIVES}
    return temp_bytes(name, program) | {"collectives": {kind: count for kind, count in counts.items() if count}}


def _arguments(workload: MeshWorkload, mesh: jax.sharding.Mesh) -> tuple[jax.Array, ...]:
    """Return x and dy, their batch over all devices, and the weights, whole or sharded over all devices."""
    H, I = workload.hidden, workload.intermediate  # noqa: E741
    rng, lead = np.random.default_rng(0), (workload.sequences, workload.tokens)
    of_weights = P(AXES) if workload.sharded_weights else P()
    shapes = ((*lead, H), (H, I), (H, I), (I, H), (*lead, H))
    specs = (P(AXES), of_weights, of_weights, of_weights, P(AXES))
    return tuple(
        jax.device_put(
            jnp.asarray(shape[-2] ** -0.5 * rng.standard_normal(shape, np.float32), workload.dtype),
            NamedSharding(mesh, spec),
        )
        for shape, spec in zip(shapes, specs, strict=True)
    )

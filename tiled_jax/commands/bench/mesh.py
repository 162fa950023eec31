"""`bench --op mesh` in JAX: an MLP of tokens sharded over eight devices, plain and tiled, under `jit` and `shard_map`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.app.bench.bench import interleave, require_parity, show, summarise
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import MESH_WORKLOADS, MeshWorkload
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.config import Tiling
from tiled_jax import tiled_mlp
from tiled_jax.commands.bench.peers import MLP, check_gradients, plain, y_and_gradients

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
AXES = ("data", "fsdp")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def bench_mesh(options: BenchOptions) -> int:
    """Parity first; then one table a workload and one record."""
    wanted = max(workload.devices for workload in MESH_WORKLOADS)
    if jax.device_count() < wanted:
        advice = f"On a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
        raise InputError(f"bench: --op mesh needs {wanted} devices, got {jax.device_count()}. {advice}")
    parity = require_parity("jax")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in MESH_WORKLOADS:
        if options.workload in (None, workload.name):
            results += measure(workload, options.turns)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    path = write_record(options.out, make_record("mesh", "tiled_jax", PACKAGES, results, parity=parity, device=device))
    print(f"record: {path}")
    return 0


def measure(workload: MeshWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant: time, temporary bytes of a device, collectives of the program; all compute the same."""
    mesh = jax.make_mesh((workload.devices // 2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        arguments = _arguments(workload, mesh)
        compiled = {
            name: jax.jit(y_and_gradients(fn)).lower(*arguments).compile() for name, fn in variants(workload).items()
        }
        check_gradients({name: run(*arguments) for name, run in compiled.items()})
        runs = {name: partial(_wait, run, arguments) for name, run in compiled.items()}
        summary = summarise(interleave(runs, repeats), "plain")
    sizes = f"B, S, H, I = {workload.sequences}, {workload.tokens}, {workload.hidden}, {workload.intermediate}"
    show(f"{workload.name}: {sizes}, {workload.dtype}, {workload.shards} shards a device", summary, "plain")
    shared = {"workload": workload.name, "shards": workload.shards, "repeats": repeats}
    return [{"variant": name, **shared, **row, **facts(compiled[name])} for name, row in summary.items()]


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


def facts(program: Any) -> dict[str, Any]:
    """Temporary bytes of a device, and how often each kind of collective stands in the program."""
    text = program.as_text()
    counts = {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES}
    return {
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "collectives": {name: count for name, count in counts.items() if count},
    }


def _arguments(workload: MeshWorkload, mesh: jax.sharding.Mesh) -> tuple[jax.Array, ...]:
    """x and dy, their batch over all devices, and the weights, whole or sharded over all devices."""
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


def _wait(run: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(run(*arguments))

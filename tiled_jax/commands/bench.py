"""The JAX half of `bench`: forward and backward of one MLP, every variant compiled once and interleaved in this process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.app.bench.bench import chosen_workloads, interleave, require_parity, show, summarise
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import MLPWorkload
from shared_specs.app.options import BenchOptions
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan
from tiled_jax.commands.bench_accuracy import bench_accuracy
from tiled_jax.commands.bench_loss import bench_loss
from tiled_jax.commands.bench_mesh import bench_mesh
from tiled_jax.commands.peers import TILED, check_gradients, variants, y_and_gradients

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def bench(options: BenchOptions) -> int:
    """Parity first; then one table a workload and one record."""
    if options.device == "gpu":
        from tiled_jax.commands.bench_gpu import bench_gpu

        return bench_gpu(options)
    if options.op == "loss":
        return bench_loss(options)
    if options.op == "accuracy":
        return bench_accuracy(options)
    if options.op == "mesh":
        return bench_mesh(options)
    parity = require_parity("jax")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_workloads(options.workload):
        results += measure(workload, options.turns)
    device = jax.devices()[0].device_kind
    path = write_record(options.out, make_record("mlp", "tiled_jax", PACKAGES, results, parity=parity, device=device))
    print(f"record: {path}")
    return 0


def measure(workload: MLPWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant, after checking that every variant computes the same y and gradients."""
    arguments = _arguments(workload)
    itemsize = arguments[0].dtype.itemsize
    shape = mlp_costs.MLPShape(
        tokens=workload.tokens,
        hidden=workload.hidden,
        intermediate=workload.intermediate,
        itemsize=itemsize,
        weight_itemsize=itemsize,
    )
    plan = mlp_costs.plan_mlp("bench", shape)
    compiled = {
        name: jax.jit(y_and_gradients(fn)).lower(*arguments).compile()
        for name, fn in variants(plan.shard_tokens).items()
    }
    check_gradients({name: run(*arguments) for name, run in compiled.items()})
    runs = {name: partial(_wait, run, arguments) for name, run in compiled.items()}
    summary = summarise(interleave(runs, repeats), "plain")
    title = (
        f"{workload.name}: T, H, I = {workload.tokens}, {workload.hidden}, {workload.intermediate}, {workload.dtype}"
    )
    show(f"{title}, {len(plan)} shards", summary, "plain")
    shared = {"workload": workload.name, "shards": len(plan), "repeats": repeats}
    predicted = predicted_bytes(shape, plan)
    memory = {
        name: {"temp_bytes": _temp_bytes(run)} | ({"predicted_bytes": predicted[name]} if name in predicted else {})
        for name, run in compiled.items()
    }
    return [{"variant": name, **shared, **row, **memory[name]} for name, row in summary.items()]


def _temp_bytes(program: Any) -> int:
    """Return the bytes that the program uses above its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def predicted_bytes(shape: mlp_costs.MLPShape, plan: ShardPlan) -> dict[str, int]:
    """Return the `temp_bytes` of the tiled variants as the formulas predict them, in bytes: an upper bound."""
    peak = mlp_costs.compiled_peak_bytes(shape, plan)
    return {name: peak + mlp_costs.saved_bytes(shape, plan, keep=keep) for name, keep in TILED.items()}


def _arguments(workload: MLPWorkload) -> tuple[jax.Array, ...]:
    """x, the weights and dy."""
    T, H, I = workload.tokens, workload.hidden, workload.intermediate  # noqa: E741
    rng = np.random.default_rng(0)
    shapes = ((T, H), (H, I), (H, I), (I, H), (T, H))
    scales = (1.0, H**-0.5, H**-0.5, I**-0.5, 1.0)
    return tuple(
        jnp.asarray(scale * rng.standard_normal(size, np.float32), workload.dtype)
        for size, scale in zip(shapes, scales, strict=True)
    )


def _wait(run: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(run(*arguments))

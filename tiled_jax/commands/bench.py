"""The JAX half of `bench`: forward and backward of one MLP, every variant compiled once and interleaved in this process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs import costs
from shared_specs.app.bench import chosen_workloads, interleave, require_parity, show, summarise
from shared_specs.cli import BenchOptions
from shared_specs.records import make_record, write_record
from shared_specs.rounding import relative_error
from shared_specs.tolerances import BENCH_GRADIENTS
from shared_specs.workloads import MLPWorkload
from tiled_jax import tiled_mlp
from tiled_jax.commands.bench_loss import bench_loss

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
MLP = Callable[..., jax.Array]


def bench(options: BenchOptions) -> int:
    """Parity first; then one table a workload and one record."""
    if options.device == "gpu":
        from tiled_jax.commands.bench_gpu import bench_gpu

        return bench_gpu(options)
    if options.op == "loss":
        return bench_loss(options)
    parity = require_parity("jax")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_workloads(options.workload):
        results += measure(workload, options.repeats)
    device = jax.devices()[0].device_kind
    path = write_record(options.out, make_record("mlp", "tiled_jax", PACKAGES, results, parity=parity, device=device))
    print(f"record: {path}")
    return 0


def measure(workload: MLPWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant, after checking that every variant computes the same y and gradients."""
    arguments = _arguments(workload)
    shape = costs.MLPShape(tokens=workload.tokens, hidden=workload.hidden, intermediate=workload.intermediate)
    plan = costs.plan_mlp("bench", shape)
    compiled = {
        name: jax.jit(_y_and_gradients(fn)).lower(*arguments).compile()
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
    return [
        {"variant": name, **shared, **row, "temp_bytes": _temp_bytes(compiled[name])} for name, row in summary.items()
    ]


def _temp_bytes(program: Any) -> int:
    """What the program uses above its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def variants(shard_tokens: int) -> dict[str, MLP]:
    """Name -> the MLP as a function of x and its three weights."""
    return {
        "plain": plain,
        "checkpoint": jax.checkpoint(plain),
        "scan-checkpoint": partial(scan_checkpoint, shard_tokens),
        "tiled": tiled_mlp,
        "tiled-keep-0.5": partial(tiled_mlp, keep=0.5),
        "tiled-keep-1": partial(tiled_mlp, keep=1.0),
    }


def plain(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    product = partial(jnp.dot, precision="highest")
    return product(jax.nn.silu(product(x, w_gate)) * product(x, w_up), w_down)


def scan_checkpoint(shard_tokens: int, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """What JAX users write today; the tokens have to be a multiple of the shard."""
    body = jax.checkpoint(lambda x: plain(x, *weights), prevent_cse=False)
    shards = x.reshape(-1, shard_tokens, x.shape[-1])
    return lax.scan(lambda _, shard: (None, body(shard)), None, shards)[1].reshape(x.shape)


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


def _y_and_gradients(fn: MLP) -> Callable[..., tuple[jax.Array, ...]]:
    """y is returned too: a forward whose result nobody reads would lose its last product."""

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, *pull(arguments[-1])

    return run


def _wait(run: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(run(*arguments))


def check_gradients(results: dict[str, tuple[jax.Array, ...]]) -> None:
    """Every variant must compute the plain gradients: a benchmark of something else is worth nothing."""
    expected = [np.asarray(array) for array in results["plain"]]
    for name, found in results.items():
        for quantity, theirs, mine in zip(("y", "dx", "dw_gate", "dw_up", "dw_down"), expected, found, strict=True):
            if not relative_error(np.asarray(mine), theirs) <= BENCH_GRADIENTS:
                raise RuntimeError(f"bench: {name} does not compute the plain {quantity}")

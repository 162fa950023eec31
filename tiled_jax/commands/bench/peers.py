"""The variants of one MLP that `bench` measures against each other: plain, checkpointed, ours. How programs are measured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs.app.bench.bench import TILED, Array, Rows, check_results, measure_times
from shared_specs.app.bench.workloads import Workload
from tiled_jax import tiled_mlp

MLP = Callable[..., jax.Array]
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
OF_MLP = ("y", "dx", "dw_gate", "dw_up", "dw_down")  # what `y_and_gradients` returns


def variants(shard_tokens: int) -> dict[str, MLP]:
    """Name -> the MLP as a function of x and its three weights."""
    return {
        "plain": plain,
        "checkpoint": jax.checkpoint(plain),
        "scan-checkpoint": partial(scan_checkpoint, shard_tokens),
        **{name: partial(tiled_mlp, keep=keep) for name, keep in TILED.items()},
    }


def plain(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    product = partial(jnp.dot, precision="highest")
    return product(jax.nn.silu(product(x, w_gate)) * product(x, w_up), w_down)


def scan_checkpoint(shard_tokens: int, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Return the result of the loop that JAX users write today; the tokens have to be a multiple of the shard."""
    body = jax.checkpoint(lambda x: plain(x, *weights), prevent_cse=False)
    shards = x.reshape(-1, shard_tokens, x.shape[-1])
    return lax.scan(lambda _, shard: (None, body(shard)), None, shards)[1].reshape(x.shape)


def y_and_gradients(fn: MLP) -> Callable[..., tuple[jax.Array, ...]]:
    """y is returned too: a forward whose result nobody reads would lose its last product."""

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, *pull(arguments[-1])

    return run


def facts() -> dict[str, Any]:
    return {"device": jax.devices()[0].device_kind}


def measure_programs(
    workload: Workload,
    shards: int,
    fns: Mapping[str, Callable[..., Any]],
    arguments: tuple[jax.Array, ...],
    quantities: tuple[str, ...],
    repeats: int,
    facts: Callable[[str, Any], Mapping[str, Any]],
) -> Rows:
    """Return one result a variant: each is compiled once, must compute what the first does, and is timed in turn.

    Args:
        quantities: names of what every fn returns. facts: what else the name and the compiled program say.
    """
    compiled: dict[str, Any] = {name: jax.jit(fn).lower(*arguments).compile() for name, fn in fns.items()}

    def results(run: Callable[..., Any]) -> dict[str, Array | None]:
        return dict(zip(quantities, map(np.asarray, jax.tree.leaves(run(*arguments))), strict=True))

    check_results((name, results(run)) for name, run in compiled.items())
    runs = {name: partial(_wait, run, arguments) for name, run in compiled.items()}
    return measure_times(workload, shards, runs, repeats, {name: facts(name, run) for name, run in compiled.items()})


def temp_bytes(name: str, program: Any) -> dict[str, int]:
    """Return what the program uses above its arguments and results."""
    return {"temp_bytes": program.memory_analysis().temp_size_in_bytes}


def _wait(run: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(run(*arguments))

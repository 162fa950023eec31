"""`bench --op accuracy` in JAX: errors of y and every gradient of one MLP in many shards."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.app.bench.accuracy import Array, inputs_of, measure_errors
from shared_specs.app.bench.workloads import AccuracyWorkload
from shared_specs.shards import plan_tokens
from tiled_jax import tiled_mlp
from tiled_jax.commands.bench.peers import MLP, OF_MLP, PACKAGES, facts, plain, scan_checkpoint, y_and_gradients

__all__ = ["PACKAGES", "facts", "measure", "variants"]


def measure(workload: AccuracyWorkload, repeats: int = 1) -> list[dict[str, Any]]:
    """Return one result a variant: its errors, the same in every repetition."""
    given = {name: jnp.asarray(array) for name, array in inputs_of(workload).items()}
    runs = {name: partial(results_of, mlp, given) for name, mlp in variants(workload).items()}
    return measure_errors(workload, runs, {}, {})


def variants(workload: AccuracyWorkload) -> dict[str, MLP]:
    """Name -> the MLP as a function of x and its three weights."""
    plan = plan_tokens(workload.tokens, num_shards=workload.shards)
    return {
        "plain": plain,
        "scan-checkpoint": partial(scan_checkpoint, plan.shard_tokens),
        "tiled": partial(tiled_mlp, num_shards=workload.shards),
    }


def results_of(mlp: MLP, given: dict[str, jax.Array]) -> dict[str, Array]:
    """Return y and every gradient, in float64."""
    operands = (given[name] for name in ("x", "w_gate", "w_up", "w_down", "dy"))
    found = jax.jit(y_and_gradients(mlp))(*operands)
    return {name: np.asarray(array).astype(np.float64) for name, array in zip(OF_MLP, found, strict=True)}

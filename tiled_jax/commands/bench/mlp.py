"""`bench --op mlp` in JAX: forward and backward of one MLP, every variant compiled once and interleaved in this process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.app.bench.bench import Rows, predicted_bytes
from shared_specs.app.bench.workloads import MLPWorkload
from shared_specs.mlp import costs as mlp_costs
from tiled_jax.commands.bench.peers import (
    OF_MLP,
    PACKAGES,
    facts,
    measure_programs,
    temp_bytes,
    variants,
    y_and_gradients,
)

__all__ = ["PACKAGES", "facts", "measure", "variants"]


def measure(workload: MLPWorkload, repeats: int) -> Rows:
    """Return one result a variant, after checking that every variant computes the same y and gradients."""
    plan = mlp_costs.plan_mlp("bench", workload.shape)
    predicted = predicted_bytes(workload.shape, plan, mlp_costs.compiled_peak_bytes)  # an upper bound

    def memory(name: str, program: Any) -> dict[str, int]:
        return temp_bytes(name, program) | ({"predicted_bytes": predicted[name]} if name in predicted else {})

    fns = {name: y_and_gradients(fn) for name, fn in variants(plan.shard_tokens).items()}
    return measure_programs(workload, len(plan), fns, _arguments(workload), OF_MLP, repeats, memory)


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

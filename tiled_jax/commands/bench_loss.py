"""`bench --op loss` in JAX: forward and backward of one linear cross entropy, every variant compiled once and interleaved."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs.app.bench.bench import chosen_loss_workloads, interleave, require_parity, show, summarise
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import LossWorkload
from shared_specs.app.options import BenchOptions
from shared_specs.core.rounding import relative_error
from shared_specs.loss import costs as loss_costs
from shared_specs.tolerances import BENCH_GRADIENTS
from tiled_jax import tiled_linear_cross_entropy

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def bench_loss(options: BenchOptions) -> int:
    """Parity first; then one table a workload and one record."""
    parity = require_parity("jax", "loss")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_loss_workloads(options.workload):
        results += measure(workload, options.turns)
    device = jax.devices()[0].device_kind
    path = write_record(options.out, make_record("loss", "tiled_jax", PACKAGES, results, parity=parity, device=device))
    print(f"record: {path}")
    return 0


def measure(workload: LossWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant, after checking that every variant computes the same loss and gradients."""
    arguments = _arguments(workload)
    plan = loss_costs.plan_loss(
        "bench", loss_costs.LossShape(tokens=workload.tokens, hidden=workload.hidden, vocab=workload.vocab)
    )
    compiled: dict[str, Any] = {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        for name, loss in variants(plan.shard_tokens).items()
    }
    check_gradients(compiled, arguments)
    runs = {name: partial(_wait, run, arguments) for name, run in compiled.items()}
    summary = summarise(interleave(runs, repeats), "plain")
    sizes = f"T, H, V = {workload.tokens}, {workload.hidden}, {workload.vocab}"
    show(f"{workload.name}: {sizes}, {workload.dtype}, {len(plan)} shards", summary, "plain")
    shared = {"workload": workload.name, "shards": len(plan), "repeats": repeats}
    return [
        {"variant": name, **shared, **row, "temp_bytes": compiled[name].memory_analysis().temp_size_in_bytes}
        for name, row in summary.items()
    ]


def variants(shard_tokens: int) -> dict[str, Loss]:
    """Name -> mean loss of hidden states, weight and targets."""
    return {
        "plain": lambda x, weight, targets: jnp.mean(losses(x, weight, targets)),
        "scan-checkpoint": partial(scan_checkpoint, shard_tokens),
        "tiled": tiled_linear_cross_entropy,
    }


def losses(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Of every token: [T]."""
    logits = jnp.dot(x, weight, precision="highest")
    of_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_target


def scan_checkpoint(shard_tokens: int, x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the loss as JAX users write it today; the tokens have to be a multiple of the shard."""

    @partial(jax.checkpoint, prevent_cse=False)
    def body(x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.sum(losses(x, weight, targets))

    shards = x.reshape(-1, shard_tokens, x.shape[-1]), targets.reshape(-1, shard_tokens)
    total, _ = lax.scan(lambda total, shard: (total + body(*shard), None), jnp.zeros((), x.dtype), shards)
    return total / targets.size


def _arguments(workload: LossWorkload) -> tuple[jax.Array, ...]:
    """x, the weight and targets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((workload.tokens, workload.hidden), np.float32)
    weight = rng.standard_normal((workload.hidden, workload.vocab), np.float32) * workload.hidden**-0.5
    targets = rng.integers(0, workload.vocab, workload.tokens)
    operands = (jnp.asarray(a, workload.dtype) for a in (x, weight))
    return *operands, jnp.asarray(targets, jnp.int32)


def _wait(run: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(run(*arguments))


def check_gradients(runs: dict[str, Callable[..., Any]], arguments: tuple[jax.Array, ...]) -> None:
    """Check that every variant computes the plain loss and gradients: a benchmark of something else is worth nothing.

    Raises:
        RuntimeError: one does not.
    """
    expected = jax.tree.leaves(runs["plain"](*arguments))
    for name, run in runs.items():
        found = jax.tree.leaves(run(*arguments))
        for quantity, theirs, mine in zip(("loss", "dx", "dweight"), expected, found, strict=True):
            if not relative_error(np.asarray(mine), np.asarray(theirs)) <= BENCH_GRADIENTS:
                raise RuntimeError(f"bench: {name} does not compute the plain {quantity}")

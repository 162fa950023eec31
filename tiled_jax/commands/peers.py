"""The variants of one MLP that `bench` measures against each other: plain, checkpointed, ours."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import BENCH_GRADIENTS
from tiled_jax import tiled_mlp

MLP = Callable[..., jax.Array]
TILED = {"tiled": 0.0, "tiled-keep-0.5": 0.5, "tiled-keep-1": 1.0}  # name -> keep


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
    """Compute the MLP as JAX users write it today; the tokens have to be a multiple of the shard."""
    body = jax.checkpoint(lambda x: plain(x, *weights), prevent_cse=False)
    shards = x.reshape(-1, shard_tokens, x.shape[-1])
    return lax.scan(lambda _, shard: (None, body(shard)), None, shards)[1].reshape(x.shape)


def y_and_gradients(fn: MLP) -> Callable[..., tuple[jax.Array, ...]]:
    """y is returned too: a forward whose result nobody reads would lose its last product."""

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, *pull(arguments[-1])

    return run


def check_gradients(results: dict[str, tuple[jax.Array, ...]]) -> None:
    """Check that every variant computes the plain gradients: a benchmark of something else is worth nothing.

    Raises:
        RuntimeError: one does not.
    """
    expected = [np.asarray(array) for array in results["plain"]]
    for name, found in results.items():
        for quantity, theirs, mine in zip(("y", "dx", "dw_gate", "dw_up", "dw_down"), expected, found, strict=True):
            if not relative_error(np.asarray(mine), theirs) <= BENCH_GRADIENTS:
                raise RuntimeError(f"bench: {name} does not compute the plain {quantity}")

"""Operands of which a share of the rows has no label, and how often a program makes statistics and gradients of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from shared_specs.config import Tiling
from tests.mlp.jax_untiled import loss_operands
from tiled_jax import tiled_linear_cross_entropy
from tiled_jax.loss import api
from tiled_jax.loss.steps import LossSteps

T, H, V, SHARD = 22, 8, 13, 4  # five shards of four rows and one of two
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


def labels(share: float, tokens: int = T, seed: int = 0) -> jax.Array:
    """Targets of which this share, anywhere among the tokens, is ignored."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, tokens)
    targets[rng.permutation(tokens)[: round(share * tokens)]] = -100
    return jnp.asarray(targets, jnp.int32)


def operands(tokens: int = T, dtype: Any = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, weight and bias."""
    x, weight, _ = loss_operands(tokens, hidden=H, vocab=V, dtype=dtype)
    return x, weight, jnp.linspace(-1, 1, V, dtype=weight.dtype)


def with_gradients(fn: Any, **options: Any) -> Any:
    """(x, weight, bias, targets) -> fn's results and the gradients of its operands, for upstream ones that all differ."""

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array, targets: jax.Array) -> Any:
        result, pull = jax.vjp(lambda x, w, b: fn(x, w, targets, bias=b, **options), x, weight, bias)
        return result, pull(
            jax.tree.map(lambda a: jnp.cos(a + jnp.arange(a.size, dtype=a.dtype).reshape(a.shape)), result)
        )

    return jax.jit(run)


tiled = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=SHARD))


def token_weights(tokens: int = T) -> jax.Array:
    """Of both signs, and some zero."""
    found = 3 * np.random.default_rng(1).standard_normal(tokens)
    return jnp.asarray(np.where(np.arange(tokens) % 7 == 2, 0, found))


RUN: list[tuple[str, int]] = []  # appending is safe from several devices' threads


@dataclass(frozen=True)
class _CountingSteps(LossSteps):
    """Steps that count the rows of logits that a running program makes statistics of, and gradients of."""

    name: ClassVar[str] = "counting"

    def statistics(self, rules: Any, logits: jax.Array, part: Any, labels: Any) -> Any:
        jax.debug.callback(lambda rows=logits.shape[0]: RUN.append(("statistics", rows)))
        return super().statistics(rules, logits, part, labels)

    def gradient(self, rules: Any, logits: jax.Array, *of_rows: Any) -> jax.Array:
        jax.debug.callback(lambda rows=logits.shape[0]: RUN.append(("gradient", rows)))
        return super().gradient(rules, logits, *of_rows)


def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, int]]:
    """Return what calls a function and returns the rows that it ran, by what was made of them."""
    monkeypatch.setattr(api, "XLA", _CountingSteps())

    def count(fn: Any, *arguments: Any) -> dict[str, int]:
        RUN.clear()
        jax.block_until_ready(fn(*arguments))
        jax.effects_barrier()
        return {kind: sum(rows for each, rows in RUN if each == kind) for kind in {kind for kind, _ in RUN}}

    return count


def rows_for(valid: int, tokens: int = T, shard: int = SHARD) -> int:
    """Rows of as many shards as `valid` rows need; the last one may be shorter."""
    return min(-(-valid // shard) * shard, tokens)


def of_devices(count: int) -> jax.Array:
    return jnp.concatenate([labels(share, seed=i) for i, share in enumerate(SHARES[:count])])


def mesh_of(*sizes: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("data", "tensor")[: len(sizes)], axis_types=(kind,) * len(sizes))

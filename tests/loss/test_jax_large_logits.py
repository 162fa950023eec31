"""Logits of 16 bits as large as a trained model's: whoever reads them sees the same ones.

Of an entry of 20 the rounding to bfloat16 is up to 0.06. A normaliser of unrounded logits beside probabilities of rounded
ones is off by as much, where XLA leaves a rounding out for one reader and not for another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.config import Tiling
from shared_specs.core.rounding import Array, relative_error
from shared_specs.tolerances import between
from tiled_jax import tiled_distillation_loss, tiled_linear_cross_entropy

T, H, V = 96, 32, 640
TILING = Tiling(num_shards=3)


def operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x [T, H] and two heads [H, V] in bfloat16, with logits of 8 on average; labels mostly the largest entry."""
    rng = np.random.default_rng(0)
    x, w, other = (rng.standard_normal(shape) for shape in ((T, H), (H, V), (H, V)))
    w, other = (8 * a / H**0.5 for a in (w, other))
    labels = np.where(rng.random(T) < 0.8, np.argmax(x @ w, 1), rng.integers(0, V, T))
    return *(jnp.asarray(a, jnp.bfloat16) for a in (x, w, other)), jnp.asarray(labels, jnp.int32)


def exact(a: jax.Array) -> Array:
    return np.asarray(a).astype(np.float64)


def rounded_probabilities(x: jax.Array, w: jax.Array) -> Array:
    z = exact((jnp.asarray(x, jnp.float32) @ jnp.asarray(w, jnp.float32)).astype(jnp.bfloat16))
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def check(loss: Callable[..., Any], x: jax.Array, w: jax.Array, dlogits: Array) -> None:
    """The gradients are those of dlogits, within the rounding of these."""
    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert relative_error(exact(dx), dlogits @ exact(w).T) <= between("bfloat16")
    assert relative_error(exact(dw), exact(x).T @ dlogits) <= between("bfloat16")


@pytest.mark.parametrize("vocab_shards", [1, 2])
def test_cross_entropy(vocab_shards: int) -> None:
    x, w, _, labels = operands()
    tiling = Tiling(num_shards=3, vocab_shards=vocab_shards)
    dlogits = (rounded_probabilities(x, w) - np.eye(V)[np.asarray(labels)]) / T
    check(lambda x, w: tiled_linear_cross_entropy(x, w, labels, tiling=tiling), x, w, dlogits)


def test_distillation() -> None:
    x, w, other, _ = operands()
    dlogits = (rounded_probabilities(x, w) - rounded_probabilities(x, other)) / T
    check(lambda x_, w: tiled_distillation_loss(x_, w, x, other, tiling=TILING), x, w, dlogits)

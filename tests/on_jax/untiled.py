"""The MLP without shards, as anyone would write it, and what differentiates it: the thing to compare with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda a: jax.nn.gelu(a, approximate=False),
    "gelu_tanh": lambda a: jax.nn.gelu(a, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda a: jnp.square(jax.nn.relu(a)),
}


def mlp(
    x: jax.Array, w_gate: jax.Array | None, w_up: jax.Array, w_down: jax.Array, activation: str = "silu"
) -> jax.Array:
    up = jnp.dot(x, w_up, precision="highest")
    act = ACTIVATIONS[activation]
    h = act(up) if w_gate is None else act(jnp.dot(x, w_gate, precision="highest")) * up
    return jnp.dot(h, w_down, precision="highest")


def operands(
    *lead: int, hidden: int = 8, intermediate: int = 12, dtype: Any = None, seed: int = 0, layers: int | None = None
) -> list[Any]:
    """x [*lead, H], w_gate, w_up, w_down; the weights with a leading dim of `layers` where it is given."""
    stack = () if layers is None else (layers,)
    shapes = [(*lead, hidden), *[(*stack, hidden, intermediate)] * 2, (*stack, intermediate, hidden)]
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(shape) / (1 if i == 0 else shape[-2] ** 0.5) for i, shape in enumerate(shapes)]
    return [jnp.asarray(value, dtype or jnp.float64) for value in values]


def y_and_gradients(fn: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """y and the gradient of every argument, for an upstream gradient that differs from row to row."""

    def run(*arguments: Any) -> list[jax.Array]:
        y, pull = jax.vjp(fn, *arguments)
        return [y, *pull(jnp.cos(y))]  # of y itself, so that on an Explicit mesh it is sharded as y is

    return run

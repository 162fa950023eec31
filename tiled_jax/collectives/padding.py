"""Devices that hold unequally many tokens: every one has as many rows, and those behind its own tokens are padding."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def is_token(sizes: Sequence[int], rows: int, axis: str) -> jax.Array | None:
    """Return [rows]: whether a row of this device is a token; None where all rows of all devices are. `sizes`: of each
    device.
    """
    if set(sizes) == {rows}:
        return None
    return jnp.arange(rows) < jnp.asarray(sizes)[lax.axis_index(axis)]


def without_padding(a: jax.Array, tokens: jax.Array | None, value: int = 0) -> jax.Array:
    """Return a [rows, ...] with `value` in its padding, whatever was there: neither it nor its gradient counts."""
    if tokens is None:
        return a
    return jnp.where(tokens.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.asarray(value, a.dtype))

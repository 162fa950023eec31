"""Arguments as a public function takes them, and as the framework-free checks see them."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail_type


def array(function: str, name: str, value: Any) -> jax.Array:
    """Return a jax.Array from one, from a NumPy array or from a Flax parameter; TypeError for anything else,
    UnsupportedError for symbolic dims."""
    if isinstance(value, nnx.Variable):
        value = value[...]
    if not isinstance(value, jax.Array | np.ndarray):
        fail_type(function, name, "an array", type(value).__name__)
    check_known_shape(function, name, value)
    # Not for a jax.Array: under differentiation jnp.asarray copies it.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def check_known_shape(function: str, name: str, value: Any) -> None:
    """Raise UnsupportedError where `jax.export` is given a dim as a symbol: shards are planned for a number of tokens."""
    if not all(isinstance(size, int) for size in value.shape):
        got = f"[{', '.join(map(str, value.shape))}]"
        advice = "Shards are planned for a number of tokens: export a program for each."
        raise UnsupportedError(error_text(function, name, "of a known shape", got, advice=advice))


def operand(value: jax.Array, device: str = "") -> checks.Operand:
    """Return an array as the checks see it."""
    return checks.Operand(tuple(value.shape), str(value.dtype), device)


def operands(values: Mapping[str, jax.Array]) -> dict[str, checks.Operand]:
    """Return the arrays of one call as the checks see them, with their devices where those differ."""
    pairs = zip(values.items(), differing_devices(values.values()), strict=True)
    return {name: operand(value, device) for (name, value), device in pairs}


def differing_devices(values: Iterable[jax.Array]) -> list[str]:
    """Return the device of each array, "" where it has none of its own, and for all of them where no two differ.

    Arrays that are traced, not committed, or on several devices have none. A program that is being traced has constants:
    it copies them to where it runs.
    """
    devices = [_device(value) for value in values]
    if len({*devices} - {None}) < 2 or isinstance(jnp.zeros(()), Tracer):
        return [""] * len(devices)
    return ["" if device is None else str(device) for device in devices]


def _device(value: jax.Array) -> Any:
    if isinstance(value, Tracer) or not value.committed:
        return None
    devices = value.sharding.device_set
    return next(iter(devices)) if len(devices) == 1 else None

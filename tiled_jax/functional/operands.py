"""Arguments as a public function takes them, and as the framework-free checks see them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs import checks
from shared_specs.errors import fail_type


def array(function: str, name: str, value: Any) -> jax.Array:
    """A jax.Array from one, from a NumPy array or from a Flax parameter; TypeError for anything else."""
    if isinstance(value, nnx.Variable):
        value = value[...]
    if not isinstance(value, jax.Array | np.ndarray):
        fail_type(function, name, "an array", type(value).__name__)
    # Not for a jax.Array: under differentiation jnp.asarray copies it.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def operand(value: jax.Array) -> checks.Operand:
    """An array as the checks see it; JAX itself compares devices."""
    return checks.Operand(tuple(value.shape), str(value.dtype))

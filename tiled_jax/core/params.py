"""What every module does with its parameters: their dtypes, their mesh axes, and the arrays that a call gets of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.core import checks
from shared_specs.errors import fail_type

# Names of the mesh axes of (hidden dim, intermediate dim); None leaves a dim whole.
Sharding = tuple[str | None, str | None]

init_weight, init_bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


def check_dtypes(function: str, dtype: Any, param_dtype: Any) -> None:
    """SpecError for a dtype that no MLP or loss is computed in; None leaves it to x and the parameters."""
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value is None:
            continue
        try:
            found = jnp.dtype(value).name
        except TypeError:
            found = repr(value)
        checks.check_param_dtype(function, name, found)


def check_sharding(function: str, sharding: Any, second: str) -> None:
    """Check that `sharding` is a pair of axes: of the hidden size and of `second`.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(sharding, tuple) or len(sharding) != 2:
        fail_type(function, "sharding", f"(axis of hidden, axis of {second}) or None", type(sharding).__name__)


def compute_dtype(x: jax.Array | np.ndarray, params: Mapping[str, jax.Array], dtype: Any) -> jnp.dtype:
    """`dtype`, or what x and the parameters promote to."""
    return jnp.dtype(dtype or jnp.result_type(x, *params.values()))


def as_operands(params: Mapping[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Return the parameters in `dtype`; float32 beside a 16-bit dtype are master weights and stay what they are."""
    return {name: a if _is_master(a.dtype, dtype) else a.astype(dtype) for name, a in params.items()}


def as_computed(x: Any, params: Mapping[str, jax.Array], dtype: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Return x and the parameters (by name) as a call computes with them: in `dtype`, or in the one they promote to.

    float32 parameters beside a 16-bit dtype are handed over as they are, so that their gradients stay float32. So is an x
    that is no array of floats, which the call refuses.
    """
    if isinstance(x, nnx.Variable):
        x = x[...]
    if not isinstance(x, jax.Array | np.ndarray) or str(x.dtype) not in checks.FLOAT_DTYPES:
        return x, dict(params)
    dtype = compute_dtype(x, params, dtype)
    return x.astype(dtype), as_operands(params, dtype)


def _is_master(param: Any, compute: Any) -> bool:
    return param == jnp.float32 and compute in (jnp.bfloat16, jnp.float16)

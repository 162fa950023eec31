"""What every module does with its parameters: their dtypes, their mesh axes, and the arrays that a call gets of them."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type

# Names of the mesh axes of (hidden dim, intermediate dim); None leaves a dim whole.
Sharding = tuple[str | None, str | None]

init_weight, init_bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


def check_initialisers(function: str, kernel_init: Any, bias_init: Any) -> None:
    """Raise TypeError for what makes no array of a key, a shape and a dtype."""
    for name, value in (("kernel_init", kernel_init), ("bias_init", bias_init)):
        if not callable(value):
            fail_type(function, name, "an initialiser, as jax.nn.initializers has them", type(value).__name__)


def check_metadata(function: str, name: str, value: Any) -> dict[str, Any]:
    """Return metadata for the variables of matrices of several forms.

    Raises:
        TypeError: it is no mapping of names. UnsupportedError: it names mesh axes, which not all of them can have.
    """
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        fail_type(function, name, "a mapping of names, or None", type(value).__name__)
    found = dict(value or {})
    if axes := [key for key in ("out_sharding", "sharding", "sharding_names") if key in found]:
        advice = "Pass sharding=: the metadata is that of matrices of several forms here."
        raise UnsupportedError(error_text(function, name, "without mesh axes of its own", axes[0], advice=advice))
    return found


def refuse_partitioned(function: str, value: Any) -> Any:
    """Return what an initialiser made; UnsupportedError where it names mesh axes, of other dims than those that are stored."""
    linen = sys.modules.get("flax.linen")
    boxed = isinstance(value, nnx.VariableMetadata) or (
        linen is not None and isinstance(value, linen.meta.AxisMetadata)
    )
    if boxed:
        advice = "Pass sharding=: one initialiser makes matrices of several forms here."
        rule = "without mesh axes of its own"
        raise UnsupportedError(error_text(function, "kernel_init", rule, "with_partitioning", advice=advice))
    return value


def as_variable(given: Any, value: jax.Array) -> nnx.Variable:
    """Return the variable that was given, whatever its type and metadata, or an nnx.Param of an array."""
    return given if isinstance(given, nnx.Variable) else nnx.Param(value)


def check_dtypes(function: str, dtype: Any, param_dtype: Any) -> None:
    """Raise SpecError for a dtype that no MLP or loss is computed in; None leaves it to x and the parameters."""
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value is None:
            continue
        try:
            found = jnp.dtype(value).name
        except TypeError:
            found = repr(value)
        checks.check_param_dtype(function, name, found)


def chosen_bias(function: str, bias: Any, use_bias: Any, default: bool) -> Any:
    """Return whether a module has biases: `use_bias`, Flax's name for it, where it is given, else `bias`.

    Raises:
        SpecError: both are given and say different things. TypeError: use_bias is neither True nor False nor None.
    """
    if use_bias is None:
        return bias
    checks.check_flags(function, use_bias=use_bias)
    if bias is not default and bias != use_bias:
        fail(function, "use_bias", f"{bias} beside bias={bias}, or left out", use_bias, advice="They are one option.")
    return use_bias


def check_precision(function: str, precision: Any) -> None:
    """Raise UnsupportedError for a precision below the one that products have here: exact products, float32 sums."""
    given = precision if isinstance(precision, tuple) else (precision,)
    if any(each not in (None, lax.Precision.HIGHEST, "highest", "float32") for each in given):
        advice = "float32 products are IEEE float32 on every device; a 16-bit dtype is the faster way."
        text = error_text(function, "precision", "None or HIGHEST here", repr(precision), advice=advice)
        raise UnsupportedError(text)


def check_sharding(function: str, sharding: Any, second: str) -> None:
    """Check that `sharding` is a pair of axes: of the hidden size and of `second`.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(sharding, tuple) or len(sharding) != 2:
        fail_type(function, "sharding", f"(axis of hidden, axis of {second}) or None", type(sharding).__name__)


def held(function: str, module: Any, needed: Iterable[str], others: Iterable[str] = ()) -> dict[str, jax.Array]:
    """Return the arrays that a module computes with, by the names of its attributes, whatever holds them.

    A variable of any type or an array: Flax freezes by the type of a variable, and `nnx.as_pure` leaves arrays alone.

    Args:
        needed: attributes that have to be there. others: that may be None or missing, such as biases.
    Raises:
        TypeError: an attribute is neither.
    """
    found = {}
    for name in (*needed, *others):
        value = getattr(module, name, None)
        if value is None and name not in needed:
            continue
        value = value[...] if isinstance(value, nnx.Variable) else value
        if not isinstance(value, jax.Array | np.ndarray):
            fail_type(function, name, "a variable of Flax or an array", type(value).__name__)
        found[name] = value
    return found


def compute_dtype(x: jax.Array | np.ndarray, params: Mapping[str, jax.Array], dtype: Any) -> jnp.dtype:
    """Return `dtype`, or what x and the parameters promote to."""
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

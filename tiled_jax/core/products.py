"""Matrix products with float32 accumulation, and the dtype that sums over tokens are kept in."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.errors import UnsupportedError, refusal_text
from tiled_jax.core.linear_call import barrier


def _product_now() -> tuple[Any, Any]:
    """Return what says whether somebody has exchanged `lax.dot_general`: itself and its code."""
    return lax.dot_general, getattr(lax.dot_general, "__code__", None)


_IMPORTED = _product_now()


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of elementwise work and of sums: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64) if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def product(a: jax.Array, b: jax.Array, dims: tuple[int, int], out: jnp.dtype) -> jax.Array:
    """Sum over dim dims[0] of a and dims[1] of b, in `out`. float32 means IEEE float32 on every device."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=out)


def product_of_rows(a: jax.Array, b: jax.Array, out: jnp.dtype) -> jax.Array:
    """a^T b over the rows of both, in `out`.

    On a CPU a is transposed first, as an array of its own: XLA's product over the rows of both takes twice the time there.
    """
    if jax.default_backend() == "cpu":
        return product(barrier(a.T), b, (1, 0), out)
    return product(a, b, (0, 0), out)


def refuse_exchanged_products(function: str, weights: Mapping[str, Any]) -> None:
    """Refuse weights whose products somebody computes otherwise while a model runs, as qwix does to quantise and adapt.

    What is computed again in backward would be computed without it, and a compiled call would be taken for the other kind.

    Raises:
        UnsupportedError: the product of one of them is not `lax.dot_general` alone now.
    """
    if _product_now() == _IMPORTED:
        return
    for name, w in weights.items():
        if getattr(w, "ndim", 0) > 1 and not _is_plain_product(w):
            wrong = f"the product with {name} is exchanged while the model runs, as qwix does"
            advice = "Quantise or adapt plain layers and put tile(layers) in their place, or leave the module out of the rules."
            raise UnsupportedError(refusal_text(function, wrong, advice=advice))


def _is_plain_product(w: Any) -> bool:
    def multiplied(rows: jax.Array) -> jax.Array:
        return lax.dot_general(rows, w, (((1,), (0,)), ((), ())))

    try:
        program = jax.make_jaxpr(multiplied)(jax.ShapeDtypeStruct((1, w.shape[0]), w.dtype)).jaxpr
    except Exception:  # of somebody else's code: it made a variable of a module, say
        return False
    return [equation.primitive.name for equation in program.eqns] == ["dot_general"]


def after(first: jax.Array, value: jax.Array) -> jax.Array:
    """Return value, not known before `first` [rows, columns] is complete. For XLA on CPUs, which orders past its own barriers.

    The condition is always true, which XLA does not see when it orders the program and LLVM does when it compiles it.
    """
    bits = lax.bitcast_convert_type(first[0, 0].astype(jnp.float32), jnp.uint32)
    nothing = lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(31)), jnp.uint32(1))
    return jnp.where(nothing == 0, value, jnp.zeros_like(value))


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return x @ weight + bias, rounded to the dtype of x once."""
    if bias is None:
        return product(x, weight, (1, 0), x.dtype)
    total = product(x, weight, (1, 0), wide(x.dtype))
    return (total + bias.astype(total.dtype)).astype(x.dtype)

"""Matrix products with float32 accumulation, and the dtype that sums over tokens are kept in."""

import jax
import jax.numpy as jnp
from jax import lax

from tiled_jax.core.linear_call import barrier


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

"""Arrays cut into equal parts, under the names that Megatron-LM gives these helpers."""

import jax
import jax.numpy as jnp

from shared_specs.collectives import checks as collective_checks
from tiled_jax.collectives import conjugates
from tiled_jax.collectives.conjugates import mesh_axis
from tiled_jax.core.arrays import array


def split_tensor_along_last_dim(tensor: jax.Array, num_partitions: int) -> tuple[jax.Array, ...]:
    """Return `num_partitions` equal parts of the last dim, in order.

    Args:
        tensor: [..., n]. num_partitions: a divisor of n, >= 1.
    Raises:
        SpecError, TypeError: the tensor cannot be split this way.
    Source: Megatron-LM, core/tensor_parallel/utils.py.
    Example:
        >>> import jax.numpy as jnp
        >>> [part.shape for part in split_tensor_along_last_dim(jnp.ones((2, 6)), 2)]
        [(2, 3), (2, 3)]
    """
    name = "split_tensor_along_last_dim"
    tensor = array(name, "tensor", tensor)
    collective_checks.check_partitions(name, num_partitions, tensor.shape)
    return tuple(jnp.split(tensor, num_partitions, -1))


def split_tensor_into_1d_equal_chunks(tensor: jax.Array, *, axis_name: str) -> jax.Array:
    """Return this device's slice of the flattened elements of an array that all devices have.

    Args:
        tensor: of any shape; R divides its number of elements.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [elements / R]. Its gradient is gathered.
    Raises:
        SpecError: the number of elements is no multiple of R; no such axis. TypeError: no array.
    Source: Megatron-LM, core/tensor_parallel/utils.py (which drops a remainder).
    """
    name = "split_tensor_into_1d_equal_chunks"
    tensor, axis = array(name, "tensor", tensor), mesh_axis(name, axis_name)
    collective_checks.check_elements(name, tensor.shape, axis.size)
    return conjugates.take_part(tensor.reshape(-1), axis, 0)


def gather_split_1d_tensor(tensor: jax.Array, *, axis_name: str) -> jax.Array:
    """Concatenate the elements of all devices: the inverse of `split_tensor_into_1d_equal_chunks`.

    Args:
        tensor: of any shape. axis_name: as there.
    Returns:
        [elements R], the same on all devices; each device's gradient is its own slice. The caller reshapes the result.
    Raises:
        SpecError, TypeError: as there.
    """
    name = "gather_split_1d_tensor"
    tensor, axis = array(name, "tensor", tensor), mesh_axis(name, axis_name)
    return conjugates.all_gather(tensor.reshape(-1), axis, 0, same=True)

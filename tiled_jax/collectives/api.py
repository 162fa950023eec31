"""Collectives with gradients, for use inside `jax.shard_map`: the conjugate pairs of tensor and sequence parallelism.

Each function is the twin of the one in `tiled_torch.collectives.api`, with a mesh axis in place of a process group, and
differentiates to its exact transpose with check_vma=True and with check_vma=False, where gradients are taken around the
`shard_map` or (check_vma=True) inside. What the names "identity in backward" and "sum in backward" mean in each mode is said
in `tiled_jax.collectives.conjugates`: with check_vma=False JAX hands each device a share of the gradient of what is the same on
all devices, so a sum is left to whoever reads the gradient (`shard_map` itself, or `lax.psum`).

All devices run one program on arrays of one shape. Uneven `split_sizes` therefore mean parts that are padded: a device's
part has the size of the longest one, the rows beyond its own size are zeros in a result and ignored in an argument.
"""

from collections.abc import Sequence
from typing import Any

import jax

from shared_specs.collectives import checks
from shared_specs.errors import fail, show_shape
from tiled_jax.collectives import conjugates
from tiled_jax.collectives.conjugates import Axis, Sizes, mesh_axis
from tiled_jax.core.arrays import array


def copy_to_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Return x unchanged; backward sums the gradients of the devices.

    Args:
        x: any shape, the same on all devices of the axis.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        x, typed as varying over the axis.
    Numerics: the sum is taken in the dtype of x.
    Memory: keeps nothing.
    Raises:
        SpecError: there is no such axis. TypeError: x is no array.
    Source: Megatron-LM, arXiv 1909.08053, section 3 (f).
    Example:
        >>> from functools import partial
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> copy = partial(copy_to_tensor_parallel_region, axis_name="tp")
        >>> jax.shard_map(copy, mesh=mesh, in_specs=P(), out_specs=P("tp"))(jax.numpy.ones(3)).shape
        (3,)
    """
    x, axis, _ = _given("copy_to_tensor_parallel_region", x, axis_name, None)
    return conjugates.copy_to(x, axis)


def reduce_from_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Return the sum over the devices; backward passes the gradient through.

    Args:
        x: any shape, this device's term. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        The shape of x, the same on all devices of the axis.
    Numerics, Memory, Raises: as `copy_to_tensor_parallel_region`.
    Source: Megatron-LM, arXiv 1909.08053, section 3 (g).
    """
    x, axis, _ = _given("reduce_from_tensor_parallel_region", x, axis_name, None)
    return conjugates.all_reduce(x, axis)


def scatter_to_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Return this device's slice of the last dim of x; backward gathers the gradients.

    Args:
        x: [..., H], the same on all devices, H a multiple of the R devices. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., H / R].
    Numerics: exact. Memory: keeps nothing.
    Raises:
        SpecError: no such axis, or H does not divide.
    Source: Megatron-LM, arXiv 1909.08053.
    """
    name = "scatter_to_tensor_parallel_region"
    x, axis, dim = _given(name, x, axis_name, -1)
    checks.check_even(name, x.shape, dim, axis.size, sizes="")
    return conjugates.take_part(x, axis, dim)


def gather_from_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Concatenate the slices of all devices along the last dim; backward keeps this device's slice of the gradient.

    Args:
        x: [..., H / R], this device's part. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., H], the same on all devices of the axis.
    Numerics, Memory: as `scatter_to_tensor_parallel_region`. Raises: SpecError where there is no such axis.
    Source: Megatron-LM, arXiv 1909.08053.
    """
    x, axis, dim = _given("gather_from_tensor_parallel_region", x, axis_name, -1)
    return conjugates.all_gather(x, axis, dim, same=True)


def scatter_to_sequence_parallel_region(
    x: jax.Array, *, dim: int = 0, split_sizes: Sequence[int] | None = None, axis_name: str
) -> jax.Array:
    """Return this device's slice of `dim`; backward gathers the gradients.

    Args:
        x: the same on all devices. dim: the dim of the tokens.
        split_sizes: the number of tokens of every device, in order; their sum is the size of `dim`. None: equal parts.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        x with max(split_sizes) entries along `dim`, zeros beyond this device's own.
    Numerics: exact. Memory: keeps nothing.
    Raises:
        SpecError: no such axis or dim, or sizes that do not fit. TypeError: a wrong kind of value.
    Source: Korthikanti et al., arXiv 2205.05198.
    """
    name = "scatter_to_sequence_parallel_region"
    x, axis, dim = _given(name, x, axis_name, dim)
    sizes = _whole_sizes(name, x, axis, dim, split_sizes)
    return conjugates.take_part(conjugates.pad_parts(x, dim, sizes), axis, dim)


def gather_from_sequence_parallel_region(
    x: jax.Array,
    *,
    dim: int = 0,
    split_sizes: Sequence[int] | None = None,
    tensor_parallel_output_grad: bool = True,
    axis_name: str,
) -> jax.Array:
    """Concatenate the tokens of all devices; backward keeps this device's slice of the (summed) gradient.

    Args:
        x: this device's part, padded along `dim` to the longest part.
        dim, split_sizes, axis_name: as in `scatter_to_sequence_parallel_region`.
        tensor_parallel_output_grad: True: every device computes with its own weights next, and their gradients are summed
            (reduce-scatter). False: all devices compute the same, and each keeps its slice of one gradient. With
            check_vma=False JAX has no such gradient, so the devices' shares are summed in either case.
    Returns:
        x with sum(split_sizes) entries along `dim`. With check_vma=True its type is varying over the axis, or the same on all
        devices with tensor_parallel_output_grad=False.
    Numerics: the sum is taken in the dtype of x. Memory: keeps nothing.
    Raises: as `scatter_to_sequence_parallel_region`.
    Source: Korthikanti et al., arXiv 2205.05198.
    """
    name = "gather_from_sequence_parallel_region"
    x, axis, dim = _given(name, x, axis_name, dim)
    sizes = None if split_sizes is None else checks.check_split_sizes(name, "split_sizes", split_sizes, axis.size)
    if sizes is not None:
        checks.check_padded_part(name, "split_sizes", sizes, x.shape, dim)
    whole = conjugates.all_gather(x, axis, dim, same=not tensor_parallel_output_grad)
    return conjugates.unpad_parts(whole, dim, sizes)


def reduce_scatter_to_sequence_parallel_region(
    x: jax.Array, *, dim: int = 0, split_sizes: Sequence[int] | None = None, axis_name: str
) -> jax.Array:
    """Return this device's slice of `dim` of the sum over devices; backward gathers the gradients.

    Args:
        x: this device's term, all tokens. dim, split_sizes, axis_name: as in `scatter_to_sequence_parallel_region`.
    Returns:
        x with max(split_sizes) entries along `dim`, zeros beyond this device's own.
    Numerics: the sum is taken in the dtype of x. Memory: keeps nothing.
    Raises: as `scatter_to_sequence_parallel_region`.
    Source: Korthikanti et al., arXiv 2205.05198.
    """
    name = "reduce_scatter_to_sequence_parallel_region"
    x, axis, dim = _given(name, x, axis_name, dim)
    sizes = _whole_sizes(name, x, axis, dim, split_sizes)
    return conjugates.reduce_scatter(conjugates.pad_parts(x, dim, sizes), axis, dim)


def all_gather_last_dim_from_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Concatenate the slices of all devices along the last dim; backward sums the gradient and scatters it.

    Args:
        x: [..., H / R], this device's part. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., H], typed as varying over the axis, because each device computes with its own weights next.
    Numerics: the sum is taken in the dtype of x. Memory: keeps nothing. Raises: SpecError where there is no such axis.
    Source: Megatron-LM, arXiv 1909.08053.
    """
    x, axis, dim = _given("all_gather_last_dim_from_tensor_parallel_region", x, axis_name, -1)
    return conjugates.all_gather(x, axis, dim, same=False)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Return this device's slice of the last dim of the sum over devices; backward gathers the gradients.

    Args:
        x: [..., H], this device's term, H a multiple of the R devices. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [..., H / R].
    Numerics: the sum is taken in the dtype of x. Memory: keeps nothing.
    Raises:
        SpecError: no such axis, or H does not divide.
    Source: Megatron-LM, arXiv 1909.08053.
    """
    name = "reduce_scatter_last_dim_to_tensor_parallel_region"
    x, axis, dim = _given(name, x, axis_name, -1)
    checks.check_even(name, x.shape, dim, axis.size, sizes="")
    return conjugates.reduce_scatter(x, axis, dim)


def all_to_all(
    x: jax.Array,
    *,
    output_split_sizes: Sequence[Sequence[int]] | None = None,
    input_split_sizes: Sequence[Sequence[int]] | None = None,
    axis_name: str,
) -> jax.Array:
    """Send rows of dim 0 from every device to every device; backward sends the gradients back.

    Args:
        x: [rows, ...], this device's rows for device 0, then for device 1, ...
        input_split_sizes: [r][s], the number of rows that device r sends to device s; row r is what rank r passes in
            tiled_torch. One program runs on all devices, so it needs the sizes of all. output_split_sizes: [s][r], the number
            of rows that device s receives from device r, the same numbers. Pass both or neither; None: equal parts.
        axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [rows, ...], with the largest number of rows that any device receives; rows beyond this device's own are zero. x
        likewise has the largest number of rows that any device sends.
    Numerics: exact. Memory: keeps nothing; with uneven sizes each device sends and holds R times the largest size, in both
        directions, because XLA has no exchange of uneven parts on a CPU.
    Raises:
        SpecError: no such axis, or sizes that do not fit. TypeError: a wrong kind of value.
    Source: the exchange of expert parallelism (GShard, arXiv 2006.16668); derived in `tiled_jax.collectives.conjugates`.
    """
    name = "all_to_all"
    x, axis, _ = _given(name, x, axis_name, None)
    rows = checks.check_exchange_of_all(name, output_split_sizes, input_split_sizes, x.shape, axis.size)
    return conjugates.exchange_rows(x, axis, rows)


def all_to_all_sequence_to_hidden(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Exchange [T / R, ..., H] for [T, ..., H / R]: all tokens, this device's features; backward is the inverse exchange.

    Args:
        x: at least two dims, H a multiple of the R devices. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [T, ..., H / R].
    Numerics: exact. Memory: keeps nothing.
    Raises:
        SpecError: no such axis, one dim only, or H does not divide.
    Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    name = "all_to_all_sequence_to_hidden"
    x, axis, last = _transposing(name, x, axis_name)
    checks.check_even(name, x.shape, last, axis.size, sizes="")
    return conjugates.exchange_parts(x, axis, last, 0)


def all_to_all_hidden_to_sequence(x: jax.Array, *, axis_name: str) -> jax.Array:
    """Exchange [T, ..., H / R] for [T / R, ..., H]: this device's tokens, all features; backward is the inverse exchange.

    Args:
        x: at least two dims, T a multiple of the R devices. axis_name: of the surrounding `jax.shard_map`.
    Returns:
        [T / R, ..., H].
    Numerics, Memory, Source: as `all_to_all_sequence_to_hidden`.
    Raises:
        SpecError: no such axis, one dim only, or T does not divide.
    """
    name = "all_to_all_hidden_to_sequence"
    x, axis, last = _transposing(name, x, axis_name)
    checks.check_even(name, x.shape, 0, axis.size, sizes="")
    return conjugates.exchange_parts(x, axis, 0, last)


def _given(function: str, x: Any, axis_name: object, dim: Any) -> tuple[jax.Array, Axis, int]:
    """Return x as an array, the axis, and `dim` counted from the front (0 where it does not matter)."""
    x = array(function, "x", x)
    axis = mesh_axis(function, axis_name)
    return x, axis, 0 if dim is None else checks.check_dim(function, dim, x.shape)


def _transposing(function: str, x: Any, axis_name: object) -> tuple[jax.Array, Axis, int]:
    x, axis, last = _given(function, x, axis_name, -1)
    if x.ndim < 2:
        fail(function, "x", "of two dims or more, tokens first and features last", show_shape(x.shape))
    return x, axis, last


def _whole_sizes(function: str, x: jax.Array, axis: Axis, dim: int, split_sizes: Any) -> Sizes | None:
    """Return the checked sizes of a dim that holds the parts of all devices."""
    if split_sizes is None:
        checks.check_even(function, x.shape, dim, axis.size)
        return None
    sizes = checks.check_split_sizes(function, "split_sizes", split_sizes, axis.size)
    checks.check_total(function, "split_sizes", sizes, x.shape, dim)
    return sizes

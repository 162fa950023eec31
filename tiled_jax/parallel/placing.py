"""Where global arrays of modules that call `jax.shard_map` themselves live: weights, and the tokens of a call."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.collective_checks import check_even
from shared_specs.errors import fail, fail_type, show_shape


def check_mesh(function: str, mesh: Any, axis_name: Any) -> int:
    """The devices of one axis of a mesh, once it has such an axis."""
    if not isinstance(mesh, Mesh):
        fail_type(function, "mesh", "a jax.sharding.Mesh", type(mesh).__name__)
    if axis_name not in mesh.axis_names:
        names = ", ".join(map(str, mesh.axis_names))
        fail(function, "axis_name", f"an axis of the mesh, one of {names}", repr(axis_name))
    return mesh.shape[axis_name]


def place(
    init: Callable[..., jax.Array], sharding: NamedSharding, key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """init(key, shape, dtype), of which every device computes and holds its own part only."""
    return jax.jit(init, static_argnums=(1, 2), out_shardings=sharding)(key, shape, jax.numpy.dtype(dtype))


def token_spec(function: str, x: jax.Array, mesh: Mesh, axis_name: str, *, split_tokens: bool) -> P:
    """How x [..., H] is split: with split_tokens its last dim of tokens over `axis_name`, and by all other axes.

    On Explicit axes x says itself how it is split over the others; on Auto axes, whose arrays do not say, that is the first
    dim over all of them.
    """
    if x.ndim < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(tuple(x.shape)))
    dims: list[tuple[Any, ...]] = [()] * x.ndim
    if AxisType.Explicit in mesh.axis_types:
        dims = [_without(entry, axis_name) for entry in (*jax.typeof(x).sharding.spec, *[None] * x.ndim)][: x.ndim]
    else:
        dims[0] = tuple(name for name in mesh.axis_names if name != axis_name)
    if split_tokens:
        dims[-2] = (*dims[-2], axis_name)
    for dim, names in enumerate(dims):
        check_even(function, tuple(x.shape), dim, math.prod(mesh.shape[name] for name in names), sizes="")
    return P(*(names or None for names in dims))


def split_as(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """x split so, where `jax.shard_map` does not see to it: on Explicit axes it takes x only as it is."""
    if AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _without(entry: Any, axis_name: str) -> tuple[Any, ...]:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name != axis_name)

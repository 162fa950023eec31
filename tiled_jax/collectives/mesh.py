"""Where global arrays of modules that call `jax.shard_map` themselves live: weights, and the tokens of a call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.checks import check_even
from shared_specs.errors import fail, fail_type, show_shape


def check_mesh(function: str, mesh: Any, axis_name: Any) -> int:
    """Return the number of devices along one axis of a mesh.

    Raises:
        SpecError: the mesh has no such axis.
        TypeError: it is no jax.sharding.Mesh.
    """
    if not isinstance(mesh, Mesh):
        fail_type(function, "mesh", "a jax.sharding.Mesh", type(mesh).__name__)
    if axis_name not in mesh.axis_names:
        names = ", ".join(map(str, mesh.axis_names))
        fail(function, "axis_name", f"an axis of the mesh, one of {names}", repr(axis_name))
    return mesh.shape[axis_name]


def place(
    init: Callable[..., jax.Array], sharding: NamedSharding, key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return init(key, shape, dtype), of which every device computes and holds its own part only."""
    return jax.jit(init, static_argnums=(1, 2), out_shardings=sharding)(key, shape, jax.numpy.dtype(dtype))


@dataclass(frozen=True)
class TokenLayout:
    """How the dims of tokens lie over the axes of a mesh other than the one that splits the weights.

    On Explicit axes as x has them; on Auto axes, whose arrays do not say, the first dim lies over all of them that divide it
    together, and is whole on all devices where they do not.
    """

    mesh: Mesh
    axis_name: str
    tokens: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, axis_name: str, x: jax.Array, token_dims: int) -> "TokenLayout":
        spec = [*jax.typeof(x).sharding.spec, *[None] * x.ndim][:token_dims]
        tokens = [tuple(name for name in _names(entry) if name != axis_name) for entry in spec]
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        free = tuple(name for name, kind in kinds if kind != AxisType.Explicit and name != axis_name)
        both = (*tokens[0], *free)
        if x.shape[0] % math.prod(mesh.shape[name] for name in both) == 0:
            tokens[0] = both
        return cls(mesh, axis_name, tuple(tokens))

    def spec(self, dims: int, dim: int | None) -> P:
        """Return the spec of an array whose first dims are those of tokens, and whose `dim` the weights' axis splits."""
        names = [list(entry) for entry in self.tokens] + [[] for _ in range(dims - len(self.tokens))]
        if dim is not None:
            names[dim].append(self.axis_name)
        return P(*(tuple(entry) or None for entry in names))

    def check(self, function: str, shape: tuple[int, ...], dim: int | None) -> None:
        """Check that the devices divide the tokens of `dim`, if there is such a dim.

        Raises:
            SpecError: they do not.
        """
        if dim is not None:
            names = (*self.tokens[dim], self.axis_name)
            check_even(function, shape, dim, math.prod(self.mesh.shape[name] for name in names), sizes="")


def token_spec(function: str, x: jax.Array, mesh: Mesh, axis_name: str, *, split_tokens: bool) -> P:
    """Return how x [..., H] is split: as its `TokenLayout`, with split_tokens its last dim of tokens over `axis_name` too."""
    if x.ndim < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(tuple(x.shape)))
    layout, dim = TokenLayout.of(mesh, axis_name, x, x.ndim - 1), x.ndim - 2 if split_tokens else None
    layout.check(function, tuple(x.shape), dim)
    return layout.spec(x.ndim, dim)


def split_as(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """x split so over Explicit axes: there `jax.shard_map` takes x only as it is, over Auto axes it moves x itself."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    names = (tuple(name for name in _names(entry) if name in explicit) for entry in spec)
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*(entry or None for entry in names))))


def _names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one dim of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)

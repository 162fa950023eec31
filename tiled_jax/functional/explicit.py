"""Explicit mesh axes that split the columns of weights: XLA is left to add up the products over them."""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import PartitionSpec as P


def through_auto_axes(
    fn: Callable[[jax.Array, dict[str, jax.Array]], jax.Array], x: jax.Array, w: Mapping[str, jax.Array]
) -> jax.Array:
    """fn(x, w) [T, H_out] with the Explicit axes that split weights as Auto ones inside; y is split as x is, over others.

    A product over a split dim has no sharding of its own, so an Explicit axis refuses it. Tokens are left as they are: a loop
    over those that are split belongs inside `jax.shard_map`.
    """
    split = _axes(*w.values())
    if not split:
        return fn(x, dict(w))
    tokens = jax.typeof(x).sharding.spec[0]
    return jax.sharding.auto_axes(fn, axes=tuple(sorted(split)), out_sharding=P(tokens, None))(x, dict(w))


def _axes(*arrays: jax.Array) -> set[str]:
    """The Explicit mesh axes that split any of the arrays; none inside `jax.shard_map` over them, where they are Manual."""
    found: set[str] = set()
    for array in arrays:
        sharding = jax.typeof(array).sharding
        for entry in sharding.spec:
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            found.update(name for name in names if name in sharding.mesh.explicit_axes)
    return found

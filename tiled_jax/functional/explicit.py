"""Explicit mesh axes that split the columns of weights: XLA is left to add up the products over them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


def _of_rows(tokens: Any) -> P:
    return P(tokens, None)


def through_auto_axes(
    fn: Callable[..., Any],
    x: jax.Array,
    w: Mapping[str, jax.Array],
    *more: Any,
    specs: Callable[[Any], Any] = _of_rows,
) -> Any:
    """fn(x, w, *more) of x [T, H] with the Explicit axes that split weights as Auto ones inside.

    A product over a split dim has no sharding of its own, so an Explicit axis refuses it. Tokens are left as they are: a loop
    over those that are split belongs inside `jax.shard_map`.

    Args:
        specs: how the results are split, from how the tokens of x are over other axes; of [T, H_out] as x is.
    """
    split = _axes(*w.values())
    if not split:
        return fn(x, dict(w), *more)
    out = specs(jax.typeof(x).sharding.spec[0])
    auto: Callable[..., Any] = jax.sharding.auto_axes(fn, axes=tuple(sorted(split)), out_sharding=out)
    return auto(x, dict(w), *more)


def _axes(*arrays: jax.Array) -> set[str]:
    """The Explicit mesh axes that split any of the arrays; none inside `jax.shard_map` over them, where they are Manual."""
    found: set[str] = set()
    for array in arrays:
        sharding = jax.typeof(array).sharding
        for entry in sharding.spec:
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            found.update(name for name in names if name in sharding.mesh.explicit_axes)
    return found

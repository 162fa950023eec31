"""The linear layer as a differentiable function of stacked weight tiles: one tile at a time is whole, the others stay as
they are stored.

Forward keeps x and the tiles as stored, never a gathered one; backward, or forward mode, gathers every tile once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.partitions import bounds
from shared_specs.errors import fail, show_shape
from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.loops import gradient_of, vary_like, vary_over
from tiled_jax.core.products import product, product_of_rows, refuse_exchanged_products, wide

Gather = Literal["collective", "compiler"]
_columns, _set_columns = partial(lax.dynamic_slice_in_dim, axis=1), partial(lax.dynamic_update_slice_in_dim, axis=1)


@dataclass(frozen=True)
class Cut:
    """One dim of a weight in `parts` runs by `partitions.bounds`.

    Arrays hold all runs at the length of the longest, so that they stack: where `parts` does not divide, a shorter run
    ends in one zero that stands for nothing.
    """

    features: int
    parts: int

    @cached_property
    def edges(self) -> tuple[int, ...]:
        return bounds(self.features, self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.edges))

    @property
    def longest(self) -> int:
        return self.edges[1]

    @property
    def stacked(self) -> int:
        """Length of all runs with their padding."""
        return self.parts * self.longest

    def run(self, a: jax.Array, part: int, dim: int = -1) -> jax.Array:
        """Return one run of a dim as users know it."""
        return lax.slice_in_dim(a, self.edges[part], self.edges[part + 1], axis=dim)

    def pad(self, a: jax.Array, dim: int = -1) -> jax.Array:
        """Return a dim as it is stacked, from the one that users know; the same array where nothing is padded."""
        if self.stacked == self.features:
            return a
        return self.join([self.run(a, part, dim) for part in range(self.parts)], dim)

    def join(self, runs: Sequence[jax.Array], dim: int = -1) -> jax.Array:
        """Return all runs, one array each, as they are stacked."""

        def widen(a: jax.Array) -> jax.Array:
            widths = [(0, 0)] * a.ndim
            widths[dim] = (0, self.longest - a.shape[dim])
            return jnp.pad(a, widths) if widths[dim][1] else a

        return jnp.concatenate([widen(a) for a in runs], axis=dim)

    def split(self, a: jax.Array, dim: int = -1) -> list[jax.Array]:
        """Return all runs of a stacked dim, without their padding."""
        starts = range(0, self.stacked, self.longest)
        return [lax.slice_in_dim(a, i, i + size, axis=dim) for i, size in zip(starts, self.sizes, strict=True)]

    def strip(self, a: jax.Array, dim: int = -1) -> jax.Array:
        """Return a stacked dim as users know it; the same array where nothing is padded."""
        return a if self.stacked == self.features else jnp.concatenate(self.split(a, dim), axis=dim)


@dataclass(frozen=True)
class Tiles:
    """How a weight [in, out] is cut: stored as [in parts, out parts, longest in run, longest out run]."""

    inputs: Cut
    outputs: Cut

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.inputs.parts, self.outputs.parts, self.inputs.longest, self.outputs.longest

    def stack(self, weight: jax.Array) -> jax.Array:
        """[in, out] -> the stored tiles."""
        padded = self.outputs.pad(self.inputs.pad(weight, 0), 1)
        i, o, rows, columns = self.shape
        return padded.reshape(i, rows, o, columns).swapaxes(1, 2)

    def unstack(self, tiles: jax.Array) -> jax.Array:
        """Return the stored tiles as [in, out]."""
        whole = tiles.swapaxes(1, 2).reshape(self.inputs.stacked, self.outputs.stacked)
        return self.outputs.strip(self.inputs.strip(whole, 0), 1)


@dataclass(frozen=True)
class TiledLinearCall:
    """All that is static about one call: the tiles, and for each dim of a tile the mesh axis it is gathered over."""

    tiles: Tiles
    axes: tuple[str | None, str | None] = (None, None)
    gathers: tuple[Gather | None, Gather | None] = (None, None)

    @property
    def manual(self) -> list[tuple[int, str]]:
        """Dims of a tile that a collective of ours gathers, and over which axis."""
        pairs = enumerate(zip(self.axes, self.gathers, strict=True))
        return [(dim, axis) for dim, (axis, gather) in pairs if axis is not None and gather == "collective"]

    @property
    def stored(self) -> P | None:
        """Return the sharding of a stored tile where the compiler gathers it."""
        names = [a if gather == "compiler" else None for a, gather in zip(self.axes, self.gathers, strict=True)]
        return P(*names) if any(names) else None

    def whole(self, tile: jax.Array) -> jax.Array:
        """Return a stored tile, gathered. Called inside the loop, so that the one before is free by then."""
        if self.stored is not None:
            # With the second constraint alone the compiler moves the gather up, to the slice out of the stack, and
            # copies what it gathered.
            tile = lax.with_sharding_constraint(lax.with_sharding_constraint(tile, self.stored), P(None, None))
        for dim, axis in self.manual:
            tile = lax.all_gather(tile, axis, axis=dim, tiled=True)
        return tile

    def reduced(self, d: jax.Array) -> jax.Array:
        """Return the gradient of this device's part of a tile from that of the gathered one, summed over devices."""
        for dim, axis in self.manual:
            d = lax.psum_scatter(d, axis, scatter_dimension=dim, tiled=True)
        return d if self.stored is None else lax.with_sharding_constraint(d, self.stored)


def tiled_linear(
    function: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tiles: Tiles,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """x @ weight + bias from tiles, for inputs and outputs that are stacked (`Cut.pad`, `Cut.split`).

    Args:
        x: [..., stacked in]. weight: as `Tiles.stack` makes it, in the dtype of x or as float32 masters; inside
            `jax.shard_map` this device's part of it. bias: [out].
        axes: mesh axes over which the two dims of every tile are stored split; axes that the surrounding mesh does not
            have split nothing.
    Returns:
        [..., stacked out], dtype of x. Padded columns hold zeros.
    Raises:
        SpecError: a tile is not what the split over a manual mesh axis leaves of it.
    """
    refuse_exchanged_products(function, {"weight": weight})
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(axis for axis, kind in kinds.items() if kind == AxisType.Explicit)
    call = TiledLinearCall(tiles, axes, _gathers(function, weight, tiles, axes, kinds))
    padded = None if bias is None else tiles.outputs.pad(bias).reshape(tiles.outputs.parts, tiles.outputs.longest)
    if not explicit:
        return _rows(call, x, weight, padded)
    # The loops cut arrays at places known only at run time, which a dim with a sharding in its type does not allow.
    spec = jax.typeof(x).sharding.spec
    out = P(*spec[:-1], None)
    auto: Callable[..., Any] = jax.sharding.auto_axes(partial(_rows, call), axes=explicit, out_sharding=out)
    return auto(x, weight, padded)


def _gathers(
    function: str, weight: jax.Array, tiles: Tiles, axes: tuple[str | None, str | None], kinds: dict[str, AxisType]
) -> tuple[Gather | None, Gather | None]:
    """Return who gathers each dim of a tile: a collective of ours inside `shard_map`, the compiler elsewhere."""

    def of(dim: int, axis: str | None) -> Gather | None:
        local, whole = weight.shape[2 + dim], tiles.shape[2 + dim]
        manual = axis is not None and kinds.get(axis) == AxisType.Manual
        size = lax.axis_size(axis) if manual else 1
        if local == whole:
            return "compiler" if axis in kinds and not manual else None
        if local * size != whole:
            rule, got = f"{whole} / {size} long in dim {2 + dim} on a device", show_shape(weight.shape)
            fail(function, "weight", rule, got, advice="Split it over the axes that `sharding` names.")
        return "collective"

    return of(0, axes[0]), of(1, axes[1])


def _rows(call: TiledLinearCall, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    operands = {"x": x.reshape(-1, x.shape[-1]), "weight": weight} | ({} if bias is None else {"bias": bias})
    y = run(call, operands)["y"]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _linear(call: TiledLinearCall, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    inputs, outputs, rows, columns = call.tiles.shape
    operands = [x, weight] if bias is None else [x, weight, bias]
    acc = wide(x.dtype)
    flat = weight.reshape(-1, *weight.shape[2:])

    def of_output(o: Any, y: jax.Array) -> jax.Array:
        def of_input(i: Any, total: jax.Array) -> jax.Array:
            tile = call.whole(_tile(flat, i * outputs + o, x.dtype))
            return total + product(_columns(x, i * rows, rows), tile, (1, 0), acc)

        total = vary_like(jnp.zeros((x.shape[0], columns), acc), *operands)
        if bias is not None:
            total = total + lax.dynamic_index_in_dim(bias, o, keepdims=False).astype(acc)
        total = lax.fori_loop(0, inputs, of_input, total)
        return _set_columns(y, total.astype(x.dtype), o * columns)

    return lax.fori_loop(
        0, outputs, of_output, vary_like(jnp.zeros((x.shape[0], outputs * columns), x.dtype), *operands)
    )


def _tile(flat: jax.Array, index: Any, dtype: Any) -> jax.Array:
    """Return one stored tile, cast before it is gathered: a 16-bit gather of float32 masters."""
    return lax.dynamic_index_in_dim(flat, index, keepdims=False).astype(dtype)


def _backward(call: TiledLinearCall, x: jax.Array, weight: jax.Array, bias: jax.Array | None, dy: jax.Array) -> Any:
    inputs, outputs, rows, columns = call.tiles.shape
    acc = wide(x.dtype)
    flat = weight.reshape(-1, *weight.shape[2:])

    def of_input(i: Any, carry: Any) -> Any:
        dx, dw = carry
        x_i = _columns(x, i * rows, rows)

        def of_output(o: Any, carry: Any) -> Any:
            dx_i, dw = carry
            dy_o = _columns(dy, o * columns, columns)
            tile = call.whole(_tile(flat, i * outputs + o, x.dtype))
            d = call.reduced(product_of_rows(x_i, dy_o, acc)).astype(dw.dtype)
            dw = lax.dynamic_update_index_in_dim(dw, d, i * outputs + o, 0)
            return dx_i + product(dy_o, tile, (1, 1), acc), dw

        dx_i = vary_like(jnp.zeros((x.shape[0], rows), acc), x, dy, weight)
        dx_i, dw = lax.fori_loop(0, outputs, of_output, (dx_i, dw))
        return _set_columns(dx, dx_i.astype(x.dtype), i * rows), dw

    axes = {axis for _, axis in call.manual}  # along which a reduced gradient varies whatever its operands do
    start = (jnp.zeros_like(x), vary_over(jnp.zeros(flat.shape, weight.dtype), axes))
    dx, dw = lax.fori_loop(0, inputs, of_input, tuple(vary_like(a, x, dy, weight) for a in start))
    db = None if bias is None else gradient_of(bias, jnp.sum(dy, axis=0, dtype=acc).reshape(bias.shape))
    return gradient_of(x, dx), gradient_of(weight, dw.reshape(weight.shape)), db


class _LinearRules:
    """y of x, weight and, where there is one, bias."""

    @staticmethod
    def forward(call: TiledLinearCall, operands: Arrays) -> Arrays:
        return {"y": _linear(call, operands["x"], operands["weight"], operands.get("bias"))}

    @staticmethod
    def save(call: TiledLinearCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        return _LinearRules.forward(call, operands), Saved(operands)

    @staticmethod
    def tangents(call: TiledLinearCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        x, weight = saved.arrays["x"], saved.arrays["weight"]
        parts = [_linear(call, t["x"], weight, None)] if "x" in t else []
        if "weight" in t:
            parts.append(_linear(call, x, t["weight"], t.get("bias")))
        elif "bias" in t:
            of_bias = jnp.broadcast_to(t["bias"].reshape(-1).astype(x.dtype), (x.shape[0], t["bias"].size))
            parts.append(vary_like(of_bias, x, weight, t["bias"]))
        return {"y": sum(parts[1:], start=parts[0])}

    @staticmethod
    def gradients(call: TiledLinearCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        given = saved.arrays
        found = _backward(call, given["x"], given["weight"], given.get("bias"), g["y"])
        return {name: d for name, d in zip(("x", "weight", "bias"), found, strict=True) if name in wanted}


# Called outside of any jit too, forward and backward are one compiled program each.
run = jax.jit(differentiable(_LinearRules.forward, _LinearRules), static_argnums=0)

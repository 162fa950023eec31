"""Parameters of fully-sharded data parallelism inside `shard_map`: gathered where they are used, gradients scattered back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from shared_specs.config import ParallelConfig
from tiled_jax.core.loops import Like, gradient_of, vary_over, varying, varying_of
from tiled_jax.layers.recompute import one_of_layers
from tiled_jax.plans.registry import MeshAxes, Path, Placement

_Tree = TypeVar("_Tree")
Opened = Callable[[nnx.State], nnx.State]
# The parameters of layers, and what else differs from one to the next.
_Stacked = tuple[nnx.State, tuple[jax.Array, ...]]


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """The surroundings of a loss inside `jax.shard_map`: the mesh, of the configuration and of its parameters' places."""

    axes: MeshAxes
    config: ParallelConfig
    placements: Mapping[Path, Placement]
    param_dtype: Any = None
    reduce_dtype: Any = None
    cast_vectors: bool = False  # whether biases and norms take param_dtype too
    held: Any = nnx.Param  # the filter of the parameters among a model's variables

    @property
    def sequence_parallel(self) -> bool:
        """Return whether each device of the tensor axis holds its part of the tokens between the split layers."""
        return self.config.tensor is not None and self.config.tensor.sequence_parallel

    @property
    def reshards(self) -> bool:
        """Return whether gathered parameters are freed after forward and gathered again in backward."""
        return bool(self.axes.shard) and self.config.data is not None and self.config.data.reshard != "never"

    def in_one_piece(self) -> "Mapped":
        """Return the same for a batch that is not cut into micro-batches."""
        return replace(self, config=replace(self.config, micro_batches=1))

    def compute_dtype(self, dtype: Any) -> Any:
        """Return the dtype in which a matrix of this dtype is gathered and computed with."""
        return jnp.dtype(dtype if self.param_dtype is None else self.param_dtype)

    def shared(self, parameters: nnx.State) -> nnx.State:
        """Return the parameters as values that may differ from device to device wherever their gradients do.

        Each gradient is summed once for a whole step over the axes that neither split the parameter nor are gathered:
        replicas and, under sequence parallelism, the tensor axis.
        """
        return self._each(parameters, (), self._shared)

    def gather(self, parameters: nnx.State, prefix: Path = ()) -> nnx.State:
        """Return the parameters whole over the shard axes, in the dtype of the computation; `prefix`: their module's path."""
        return self._each(parameters, prefix, self._gathered)

    def cast(self, batch: Any) -> Any:
        """Return a batch with its floating-point arrays in the dtype of the computation."""
        if self.param_dtype is None:
            return batch
        dtype = jnp.dtype(self.param_dtype)
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, batch)

    def _each(self, parameters: nnx.State, prefix: Path, fn: Callable[[jax.Array, Placement], jax.Array]) -> nnx.State:
        flat = nnx.to_flat_state(parameters)
        done = [(path, leaf.replace(fn(leaf.get_value(), self.placements[(*prefix, *path)]))) for path, leaf in flat]
        return nnx.from_flat_state(done)

    def _shared(self, w: jax.Array, placement: Placement) -> jax.Array:
        axes = set(self.axes.data)
        if placement.shard_dim is not None:
            axes -= set(self.axes.shard)
        if self.sequence_parallel and placement.tensor_dim is None:
            axes |= {str(self.axes.tensor)}
        return sum_gradient(w, tuple(sorted(axes)), self.reduce_dtype)

    def _gathered(self, w: jax.Array, placement: Placement) -> jax.Array:
        dtype = self.compute_dtype(w.dtype) if placement.dims > 1 or self.cast_vectors else w.dtype
        if placement.shard_dim is None or not self.axes.shard:
            return w.astype(dtype)
        return gather_parts(w, placement.shard_dim + w.ndim, self.axes.shard, dtype, self.reduce_dtype)

    def scan(
        self,
        fn: Callable[..., jax.Array],
        parameters: nnx.State,
        x: jax.Array,
        prefix: Path,
        of_layer: jax.Array | None = None,
        opened: Opened | None = None,
    ) -> jax.Array:
        """x = fn(parameters of one layer, x) for each of the stacked layers at `prefix`, in a rolled loop.

        fn sees parameters that are whole over the shard axes; of those no more than one layer's exist, unless
        `reshard="never"`. Backward computes again what the configuration's checkpointing says; with mode "layers" the loop
        is over groups of `every` layers, and those beyond the last group, which keep all, are a loop of their own.
        of_layer: [layers, ...], of which fn is given the layer's own behind x; None: nothing. opened: what fn sees of a layer's
        whole parameters, as wholly gone after forward and made again in backward as they are; None: themselves.
        """
        checkpointing = self.config.checkpointing
        every = 1 if checkpointing is None else checkpointing.every or 1
        stacked = (parameters, () if of_layer is None else (of_layer,))
        count = jax.tree.leaves(parameters)[0].shape[0]
        groups, rest = divmod(count, every)
        if groups:
            cut = stacked if every == 1 else _map(lambda a: a[: groups * every], stacked)
            x = self._loop(fn, cut, x, prefix, every, opened)
        return self._loop(fn, _map(lambda a: a[groups * every :], stacked), x, prefix, 1, opened) if rest else x

    def _loop(
        self,
        fn: Callable[..., Any],
        stacked: _Stacked,
        x: jax.Array,
        prefix: Path,
        every: int,
        opened: Opened | None,
    ) -> jax.Array:
        """Groups of `every` layers."""
        if every == 1:
            count = jax.tree.leaves(stacked)[0].shape[0]
            one = self.layer(fn, prefix, index=0, count=count, opened=opened)
            return lax.scan(lambda x, of: (one(of[0], x, *of[1]), None), x, stacked)[0]
        layers = [self.layer(fn, prefix, index=index, place=index, opened=opened) for index in range(every)]

        def group(x: jax.Array, of: _Stacked) -> tuple[jax.Array, None]:
            for place, layer in enumerate(layers):
                x = layer(of[0], x, *(a[place] for a in of[1]))
            return x, None

        return lax.scan(group, x, _map(lambda a: a.reshape(-1, every, *a.shape[1:]), stacked))[0]

    def layer(
        self,
        fn: Callable[..., Any],
        prefix: Path,
        *,
        index: int = 0,
        count: int = 1,
        place: int | None = None,
        opened: Opened | None = None,
    ) -> Callable[..., Any]:
        """fn(parameters, *arrays) of a layer's whole parameters, as a function of this device's parts of them.

        index: of the layer in its stack, which has `count` of them. place: its parameters' among those of several, which the
        function is given. opened: as `scan` takes it.
        """
        last = lambda *given: fn(given[-1], *given[:-1])  # noqa: E731 -- the parameters
        again = one_of_layers(last, self.config.checkpointing, index=index, count=count)

        def whole(parameters: nnx.State) -> nnx.State:
            found = self.gather(parameters if place is None else _map(lambda a: a[place], parameters), prefix)
            return found if opened is None else opened(found)

        kept = not self.reshards and (place is None or bool(self.axes.shard))

        def call(parameters: nnx.State, *arrays: Any) -> Any:
            return again(*arrays, whole(parameters)) if kept else _freed(_Layer(again, whole), parameters, arrays)

        return call


def _map(fn: Callable[[jax.Array], jax.Array], parameters: _Tree) -> _Tree:
    return jax.tree.map(fn, parameters)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer of whole parameters, and how they are made whole."""

    fn: Callable[..., Any]
    gather: Callable[[nnx.State], nnx.State]


@partial(jax.tree_util.register_dataclass, data_fields=["parameters", "kept"], meta_fields=["tree", "whole"])
@dataclass(frozen=True)
class _Residuals:
    """The residuals of a layer: this device's parts, and everything that is no whole parameter."""

    parameters: Any
    kept: tuple[jax.Array, ...]
    tree: Any  # of the pullback
    whole: tuple[int | None, ...]  # for each of its leaves the number of the whole parameter that it is, or None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _freed(layer: _Layer, parameters: nnx.State, arrays: tuple[Any, ...]) -> Any:
    """layer.fn of the gathered parameters, which are freed after forward and gathered again in backward."""
    return layer.fn(*arrays, layer.gather(parameters))


def _freed_forward(layer: _Layer, parameters: nnx.State, arrays: tuple[Any, ...]) -> tuple[Any, _Residuals]:
    whole = layer.gather(parameters)
    y, pull = jax.vjp(layer.fn, *arrays, whole)
    numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(whole))}
    leaves, tree = jax.tree.flatten(pull)
    found = tuple(numbers.get(id(leaf)) for leaf in leaves)
    kept = tuple(leaf for leaf, number in zip(leaves, found, strict=True) if number is None)
    return y, _Residuals(parameters, kept, tree, found)


def _freed_backward(layer: _Layer, saved: _Residuals, dy: Any) -> tuple[Any, tuple[Any, ...]]:
    # Without the barrier XLA takes the parameters that forward gathered, and keeps them. One for each: a barrier gives all
    # that go through it the axes along which any of them differs.
    parameters = jax.tree.map(lax.optimization_barrier, saved.parameters)
    whole, scatter = jax.vjp(layer.gather, parameters)
    gathered, kept = jax.tree.leaves(whole), iter(saved.kept)
    leaves = [next(kept) if number is None else gathered[number] for number in saved.whole]
    *d_arrays, d_whole = jax.tree.unflatten(saved.tree, leaves)(dy)
    return scatter(d_whole)[0], tuple(d_arrays)


_freed.defvjp(_freed_forward, _freed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_first(loss: Callable[[jax.Array, Any], jax.Array], x: jax.Array, head: Any) -> jax.Array:
    """loss(x, head), of which the gradient of x is there only when that of this device's part of the head is.

    Without that the whole gradient of the head, in float32, would wait to the end of the step to be reduced. And the head is
    gathered only when x is there: a tied table is gathered once for the tokens and once for the head.
    """
    return loss(x, lax.optimization_barrier((x, head))[1])


def _head_first_forward(loss: Callable[[jax.Array, Any], jax.Array], x: Any, head: Any) -> tuple[jax.Array, Any]:
    perturbed = [leaf.perturbed for leaf in jax.tree.leaves(head, is_leaf=_is_primal)]
    x, head = (jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal) for tree in (x, head))
    head = lax.optimization_barrier((x, head))[1]
    if any(perturbed):
        return jax.vjp(loss, x, head)
    return jax.vjp(lambda x: loss(x, head), x)  # a head that is not trained has no gradient


def _head_first_backward(loss: Callable[[jax.Array, Any], jax.Array], pull: Any, d: jax.Array) -> tuple[Any, Any]:
    dx, *of_head = pull(d)
    if not of_head:
        return dx, None
    leaves = jax.tree.leaves(of_head)
    if varying_of(leaves) <= varying(dx):  # else the barrier would change along which axes dx is typed as differing
        dx = lax.optimization_barrier((dx, leaves))[0]
    return dx, of_head[0]


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


head_first.defvjp(_head_first_forward, _head_first_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sum_gradient(w: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """w, typed as differing along `axes`; its gradient is summed over them, in `dtype` (None: its own)."""
    return vary_over(w, axes)


def _sum_gradient_forward(w: jax.Array, axes: tuple[str, ...], dtype: Any) -> tuple[jax.Array, None]:
    return vary_over(w, axes), None


def _sum_gradient_backward(axes: tuple[str, ...], dtype: Any, _: None, d: jax.Array) -> tuple[jax.Array]:
    return ((lax.psum(d.astype(dtype or d.dtype), axes) if axes else d).astype(d.dtype),)


sum_gradient.defvjp(_sum_gradient_forward, _sum_gradient_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_parts(w: jax.Array, dim: int, axes: tuple[str, ...], dtype: Any, reduce_dtype: Any) -> jax.Array:
    """w of every device along `axes` side by side, cast first; each device gets its part of the summed gradient.

    The sum is taken in `reduce_dtype` (None: that of the gradient).
    """
    parts = lax.all_gather(w.astype(dtype), axes)
    # Whole parts one behind the other, and put side by side for this layer alone: to gather along an inner dim XLA would
    # transpose the stack of all layers, and keep that beside it.
    return jnp.moveaxis(parts, 0, dim).reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def _gather_parts_forward(
    w: jax.Array, dim: int, axes: tuple[str, ...], dtype: Any, reduce_dtype: Any
) -> tuple[jax.Array, Like]:
    return gather_parts(w, dim, axes, dtype, reduce_dtype), _like(w)


def _gather_parts_backward(
    dim: int, axes: tuple[str, ...], dtype: Any, reduce_dtype: Any, like: Like, d: jax.Array
) -> tuple[jax.Array]:
    d = d.astype(reduce_dtype or d.dtype)
    parts = d.reshape(*d.shape[:dim], lax.axis_size(axes), -1, *d.shape[dim + 1 :])
    return (gradient_of(like, lax.psum_scatter(jnp.moveaxis(parts, dim, 0), axes)),)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["dtype", "axes"])
@dataclass(frozen=True)
class _StaticLike(Like):
    """`Like` as a residual without arrays."""


def _like(w: jax.Array) -> _StaticLike:
    like = Like.of(w)
    return _StaticLike(like.dtype, like.axes)


gather_parts.defvjp(_gather_parts_forward, _gather_parts_backward)

"""Linear and embedding layers whose weights are split over an axis of a mesh, called with global arrays. No math."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.collectives import checks as collective_checks
from shared_specs.config import ParallelLinearOptions
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.layers import checks as layer_checks
from tiled_jax.collectives.mesh import TokenLayout, check_mesh, place, split_as
from tiled_jax.core.arrays import array
from tiled_jax.core.params import compute_dtype, init_bias, init_weight
from tiled_jax.layers.embedding import vocab_parallel_embedding
from tiled_jax.layers.linear import DEFAULTS, UNUSED, column_parallel_linear, row_parallel_linear
from tiled_jax.tile.module_state import check_module_rngs

InitMethod = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
_PARTIAL = "A global array is never a partial sum. Call the function inside jax.shard_map."
_UNUSED = {**UNUSED, "explicit_expert_comm": _PARTIAL}
_init_embedding = nnx.initializers.normal(1.0)


class _Arrays(NamedTuple):
    """How a layer's arrays are made: where, of what dtypes, from which random numbers."""

    mesh: Any
    axis_name: Any
    dtype: Any
    param_dtype: Any
    rngs: nnx.Rngs


class _ParallelLinear(nnx.Module):
    """A linear layer split along `dim` of its weight [in, out]."""

    def _build(
        self,
        dim: int,
        sizes: tuple[int, int],
        bias: bool,
        flags: dict[str, bool],
        init_method: InitMethod | None,
        options: ParallelLinearOptions,
        arrays: _Arrays,
        allocate: bool = True,
    ) -> None:
        """Check the arguments, keep them and make the parameters; a bias is split where the outputs are."""
        name, (in_features, out_features) = type(self).__name__, sizes
        mesh, axis_name, dtype, param_dtype, rngs = arrays
        check_module_rngs(name, rngs)
        checks.check_sizes(name, {"in_features": in_features, "out_features": out_features})
        layer_checks.check_flags(name, bias=bias, **flags)
        sequence_parallel, kind = flags["sequence_parallel"], ("row", "column")[dim]
        layer_checks.check_linear_options(name, options, kind=kind, sequence_parallel=sequence_parallel, unused=_UNUSED)
        ranks = check_mesh(name, mesh, axis_name)
        layer_checks.check_split(name, ("in_features", "out_features")[dim], sizes[dim], ranks, options.stride)
        self.sequence_parallel, self.skip_bias_add = sequence_parallel, flags["skip_bias_add"]
        self.options, self.mesh, self.axis_name, self.dtype = options, mesh, axis_name, dtype
        parts: list[tuple[int, ...]] = [(size,) for size in sizes]
        parts[dim] = (sizes[dim],) if options.stride == 1 else (options.stride, sizes[dim] // options.stride)
        self.weight_shape, self.bias_shape = (*parts[0], *parts[1]), parts[1]
        split = len(self.weight_shape) - (2, 1)[dim]
        self.weight_spec = _split_at(len(self.weight_shape), split, axis_name)
        self.bias_spec = _split_at(len(self.bias_shape), len(self.bias_shape) - 1, axis_name) if dim else P()
        draw = partial(_in_shape, _checked_init(self, init_method, init_weight), sizes)
        key = rngs.params()
        self.weight = self._parameter(draw, key, self.weight_shape, self.weight_spec, param_dtype) if allocate else None
        self.bias = (
            self._parameter(init_bias, rngs.params(), self.bias_shape, self.bias_spec, param_dtype) if bias else None
        )

    def _parameter(self, init: Any, key: jax.Array, shape: tuple[int, ...], spec: P, dtype: Any) -> nnx.Param:
        return nnx.Param(place(init, NamedSharding(self.mesh, spec), key, shape, dtype))

    def _specs(self, given: dict[str, jax.Array]) -> dict[str, P]:
        return {name: getattr(self, f"{name}_spec") for name in given}


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are split over an axis of a mesh: `column_parallel_linear` with parameters.

    Args:
        in_features, out_features: sizes of the whole layer; the R devices of the axis divide out_features.
        bias: whether the layer has a bias, split like the outputs.
        gather_output: return all outputs on every device.
        sequence_parallel: x is split by tokens over the axis, along options.sequence_dim.
        skip_bias_add: return (y, bias) without adding the bias.
        allocate_weight: the layer owns a weight. False: each call passes the weight.
        init_method: (key, shape, dtype) -> the whole weight [in, out]; the bias is zero. None: lecun_normal, as nnx.Linear.
        options: sequence_dim, and stride for a weight that consists of `stride` fused weights; the rest stays at its defaults.
        mesh: a `jax.sharding.Mesh` of Auto or Explicit axes. axis_name: the mesh axis that splits the weight. The other axes
            hold copies of the weight and split tokens: Explicit axes as x is split, Auto axes along the first dim.
        dtype: of the computation; None: the dtype to which x and the parameters promote. param_dtype: of the parameters.
        rngs: its `params` stream draws the parameters; they are the same at every R.
    Parameters are global arrays: weight [in, out] split by column, bias [out]. With stride s > 1 they are [in, s, out / s] and
    [s, out / s], split along the last dim, so their meaning does not depend on the number of devices. The output is then [...,
    s, out / s] too, unless it is gathered.
    Raises:
        SpecError, TypeError: as `column_parallel_linear`; SpecError where R does not divide.
    Source: Megatron-LM, arXiv 1909.08053.
    Example:
        mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        layer = ColumnParallelLinear(4096, 14336, mesh=mesh, rngs=nnx.Rngs(0))
        y = jax.jit(lambda layer, x: layer(x))(layer, x)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        allocate_weight: bool = True,
        init_method: InitMethod | None = None,
        options: ParallelLinearOptions = DEFAULTS,
        mesh: Mesh,
        axis_name: str = "tp",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        flags = {
            "gather_output": gather_output,
            "sequence_parallel": sequence_parallel,
            "skip_bias_add": skip_bias_add,
            "allocate_weight": allocate_weight,
        }
        self.gather_output = gather_output
        arrays = _Arrays(mesh, axis_name, dtype, param_dtype, rngs)
        self._build(1, (in_features, out_features), bias, flags, init_method, options, arrays, bool(allocate_weight))

    def __call__(
        self, x: jax.Array, weight: jax.Array | None = None, runtime_gather_output: bool | None = None
    ) -> jax.Array | tuple[jax.Array, jax.Array | None]:
        """[..., in] -> [..., out], or (y, bias) with skip_bias_add; y is split by features, or whole if gathered.

        weight: in place of the layer's own. runtime_gather_output: None keeps the layer's.
        """
        name = type(self).__name__
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        layer_checks.check_flags(name, runtime_gather_output=gather)
        weight = _value(self.weight) if weight is None else array(name, "weight", weight)
        if weight is None:
            fail(name, "weight", "given to a layer made with allocate_weight=False", None)
        if weight.shape != self.weight_shape:
            fail(name, "weight", show_shape(self.weight_shape), show_shape(weight.shape))
        bias = _value(self.bias)
        x = _tokens(name, x)
        stride, added = self.options.stride, None if self.skip_bias_add else bias
        given = {"weight": weight} | ({} if added is None else {"bias": added})
        dtype = compute_dtype(x, given, self.dtype)

        def on_device(x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
            flat = {key: a.reshape(*a.shape[:-1] if stride == 1 else a.shape[:-2], -1) for key, a in given.items()}
            y = column_parallel_linear(
                x,
                **flat,
                gather_output=gather,
                sequence_parallel=self.sequence_parallel,
                options=self.options,
                axis_name=self.axis_name,
            )
            return y if gather or stride == 1 else y.reshape(*y.shape[:-1], stride, -1)

        dim, layout = _sequence_dim(name, self, x.shape), TokenLayout.of(self.mesh, self.axis_name, x, x.ndim - 1)
        layout.check(name, x.shape, dim)
        dims = x.ndim if gather or stride == 1 else x.ndim + 1
        specs = layout.spec(x.ndim, dim), self._specs(given)
        cast = {key: a.astype(dtype) for key, a in given.items()}
        out = layout.spec(dims, None if gather else dims - 1)
        y = _on_devices(layout, on_device, specs, out, x.astype(dtype), cast)
        return (y, bias) if self.skip_bias_add else y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are split over an axis of a mesh: `row_parallel_linear` with parameters.

    Args:
        in_features, out_features: sizes of the whole layer; the R devices of the axis divide in_features.
        bias: whether the layer has a bias, the same on every device.
        input_is_parallel: x is split by features over the axis, as a `ColumnParallelLinear` returns it (with
            options.stride too); else it is the same on all devices.
        sequence_parallel: y is split by tokens over the axis, along options.sequence_dim.
        skip_bias_add, init_method, options, mesh, axis_name, dtype, param_dtype, rngs: as in `ColumnParallelLinear`.
    Parameters are global arrays: weight [in, out] split by row, with stride s > 1 [s, in / s, out] along its middle dim;
    bias [out].
    Raises, Source: as `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
        options: ParallelLinearOptions = DEFAULTS,
        mesh: Mesh,
        axis_name: str = "tp",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        flags = {
            "input_is_parallel": input_is_parallel,
            "sequence_parallel": sequence_parallel,
            "skip_bias_add": skip_bias_add,
        }
        if sequence_parallel and not input_is_parallel:
            fail(type(self).__name__, "input_is_parallel", "True with sequence_parallel", input_is_parallel)
        self.input_is_parallel = input_is_parallel
        arrays = _Arrays(mesh, axis_name, dtype, param_dtype, rngs)
        self._build(0, (in_features, out_features), bias, flags, init_method, options, arrays)

    def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array | None]:
        """Return [..., in] ([..., s, in / s] with options.stride and input_is_parallel) -> [..., out], or (y, bias)."""
        name, stride = type(self).__name__, self.options.stride
        assert self.weight is not None
        weight, bias = self.weight[...], _value(self.bias)
        x = _tokens(name, x)
        fused = self.input_is_parallel and stride > 1
        if fused and x.shape[-2] != stride:
            fail(name, "x", f"[..., {stride}, in / {stride}] with options.stride", show_shape(x.shape))
        given = {"weight": weight} | ({} if bias is None or self.skip_bias_add else {"bias": bias})
        dtype = compute_dtype(x, given, self.dtype)

        def on_device(x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
            x = x.reshape(*x.shape[:-2], -1) if fused else x
            return row_parallel_linear(
                x,
                given["weight"].reshape(-1, weight.shape[-1]),
                given.get("bias"),
                input_is_parallel=self.input_is_parallel,
                sequence_parallel=self.sequence_parallel,
                options=self.options,
                axis_name=self.axis_name,
            )

        dims = x.ndim - 1 if fused else x.ndim
        y_shape = (*x.shape[: dims - 1], weight.shape[-1])
        dim, layout = _sequence_dim(name, self, y_shape), TokenLayout.of(self.mesh, self.axis_name, x, dims - 1)
        layout.check(name, y_shape, dim)
        specs = layout.spec(x.ndim, x.ndim - 1 if self.input_is_parallel else None), self._specs(given)
        cast = {key: a.astype(dtype) for key, a in given.items()}
        y = _on_devices(layout, on_device, specs, layout.spec(dims, dim), x.astype(dtype), cast)
        return (y, bias) if self.skip_bias_add else y


class VocabParallelEmbedding(nnx.Module):
    """An embedding whose vocabulary is split over an axis of a mesh: `vocab_parallel_embedding` with a parameter.

    Args:
        num_embeddings: V. Each of the R devices holds ceil(V / R) entries. Entries beyond V on the last devices are padding:
            zero and without gradient.
        embedding_dim: H.
        reduce_scatter_embeddings, sequence_dim, deterministic: as in `vocab_parallel_embedding`.
        init_method: (key, shape, dtype) -> the whole [V, H]; None: standard normal.
        mesh, axis_name, dtype, param_dtype, rngs: as in `ColumnParallelLinear`.
    The parameter is a global array: weight [R ceil(V / R), H], split by row.
    Raises, Source: as `vocab_parallel_embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        reduce_scatter_embeddings: bool = False,
        sequence_dim: int = 0,
        deterministic: bool = False,
        init_method: InitMethod | None = None,
        mesh: Mesh,
        axis_name: str = "tp",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        name = type(self).__name__
        checks.check_sizes(name, {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim})
        if sequence_dim != 0 and not reduce_scatter_embeddings:
            fail(name, "sequence_dim", "left out without reduce_scatter_embeddings", sequence_dim)
        flags = {"reduce_scatter_embeddings": reduce_scatter_embeddings, "deterministic": deterministic}
        layer_checks.check_flags(name, **flags)
        check_module_rngs(name, rngs)
        ranks = check_mesh(name, mesh, axis_name)
        self.num_embeddings, self.sequence_dim, self.deterministic = num_embeddings, sequence_dim, deterministic
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.mesh, self.axis_name, self.dtype = mesh, axis_name, dtype
        draw = partial(_padded, _checked_init(self, init_method, _init_embedding), (num_embeddings, embedding_dim))
        shape = (-(-num_embeddings // ranks) * ranks, embedding_dim)
        sharding = NamedSharding(mesh, P(axis_name, None))
        self.weight = nnx.Param(place(draw, sharding, rngs.params(), shape, param_dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[*tokens] -> [*tokens, H], split by tokens along sequence_dim with reduce_scatter_embeddings."""
        name = type(self).__name__
        ids, weight = array(name, "ids", ids), self.weight[...]
        if ids.ndim == 0:
            fail(name, "ids", "of one dim or more", show_shape(ids.shape))
        dim = (
            collective_checks.check_dim(name, self.sequence_dim, ids.shape) if self.reduce_scatter_embeddings else None
        )
        on_device = partial(
            vocab_parallel_embedding,
            vocab_size=self.num_embeddings,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            sequence_dim=self.sequence_dim,
            deterministic=self.deterministic,
            axis_name=self.axis_name,
        )
        layout = TokenLayout.of(self.mesh, self.axis_name, ids, ids.ndim)
        layout.check(name, ids.shape, dim)
        specs = layout.spec(ids.ndim, None), P(self.axis_name, None)
        weight = weight.astype(self.dtype or weight.dtype)
        return _on_devices(layout, on_device, specs, layout.spec(ids.ndim + 1, dim), ids, weight)


def _checked_init(layer: nnx.Module, init_method: InitMethod | None, default: InitMethod) -> InitMethod:
    if init_method is not None and not callable(init_method):
        fail_type(type(layer).__name__, "init_method", "a function or None", type(init_method).__name__)
    return init_method or default


def _in_shape(
    init: InitMethod, whole: tuple[int, ...], key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    return init(key, whole, dtype).reshape(shape)


def _padded(init: InitMethod, whole: tuple[int, ...], key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.pad(init(key, whole, dtype), [(0, full - size) for full, size in zip(shape, whole, strict=True)])


def _value(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _tokens(function: str, x: Any) -> jax.Array:
    x = array(function, "x", x)
    if x.ndim < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(x.shape))
    return x


def _split_at(dims: int, dim: int | None, axis_name: str) -> P:
    return P(*(axis_name if d == dim else None for d in range(dims)))


def _sequence_dim(function: str, layer: Any, shape: tuple[int, ...]) -> int | None:
    """Return the dim of tokens of x or y that sequence parallelism splits over the devices, or None."""
    if not layer.sequence_parallel:
        return None
    ranks = layer.mesh.shape[layer.axis_name]
    dim, _ = layer_checks.check_sequence_dim(function, layer.options.sequence_dim, None, shape, ranks)
    return dim


def _on_devices(
    layout: TokenLayout, fn: Callable[..., jax.Array], in_specs: tuple[P, Any], out: P, x: jax.Array, given: Any
) -> jax.Array:
    """fn of every device's part of x and of what else is given.

    All axes of the mesh are mapped: over some alone, XLA on a CPU fails to compile sums in 16 bits.
    """
    mapped = jax.shard_map(fn, mesh=layout.mesh, in_specs=in_specs, out_specs=out)
    return mapped(split_as(x, layout.mesh, in_specs[0]), given)

"""Token-wise work where a mesh cuts the tokens: every device computes its own, and sums over tokens are added up once.

A loop over shards of tokens says nothing that a partitioner could use: left alone, XLA gathers all tokens in every step.
Under plain `jit` on Auto axes the loop is a `custom_partitioning`, which is shown how the operands are cut and runs on a
device's own part of them. Explicit axes are named by the types, and `Tiling.token_axes` names Auto ones: there it is a
`shard_map`. Inside a `shard_map` of the caller's, and where there is one device, it is the loop itself.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.errors import fail, show_shape
from tiled_jax.core.loops import varying

Arrays = dict[str, jax.Array]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """How a mesh cuts one call.

    Args:
        mesh: its axes. tokens: for each leading dim of x the axes that cut it; None where only the partitioner knows.
        columns: the axes over which weights are split by columns. manual: the axes of a `shard_map` for all of these.
    """

    mesh: AbstractMesh
    tokens: tuple[Axes, ...] | None = None
    columns: Axes = ()
    manual: frozenset[str] = frozenset()

    @property
    def token_axes(self) -> Axes:
        return tuple(axis for axes in self.tokens or () for axis in axes)

    @property
    def typed(self) -> bool:
        """Return whether this stands in a `shard_map` of the caller's whose types say along which axes a value varies."""
        return any(varying(lax.axis_index(axis)) for axis in self.mesh.manual_axes)

    @property
    def on_device(self) -> AbstractMesh:
        """Return the mesh as work inside the `shard_map` sees it."""
        return self.mesh.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    def unit(self, length: int) -> int:
        """Return a length that every part of a dim so long is a multiple of as well, however the mesh cuts it evenly."""
        return math.gcd(length, self.mesh.size)


@dataclass(frozen=True)
class TokenOp:
    """Work on a device's own tokens.

    Args:
        run: (rows, whole, axes) -> (results, sums), by name. rows and results are [tokens, ...], whole is the same on all
            devices but for columns, which `axes` split. A sum is over the tokens.
        column_dim: the dim of a whole operand, or of a sum, by its name, that may be split over devices.
        partial: results that are sums over columns too. of_columns: rows and results whose last dim are columns.
        multiple: of which a device's columns must be a multiple.
        numbered: whether run is given "device" too, which number a device has among those that cut the tokens.
    """

    run: Callable[..., tuple[Arrays, Arrays]]
    column_dim: Callable[[str], int | None]
    partial: Collection[str] = ()
    of_columns: Collection[str] = ()
    multiple: int = 1
    numbered: bool = False


def split_of(
    function: str, x: jax.Array, others: Iterable[jax.Array], columns: Iterable[tuple[jax.Array, int]], token_axes: Any
) -> Split | None:
    """Return how the mesh that is here cuts a call; None where nothing has to be done about it.

    columns: weights with the dim that tensor parallelism splits.
    """
    here = jax.sharding.get_abstract_mesh()
    arrays = [x, *others]
    if here.manual_axes:
        mesh, token_axes = here, _not_manual(function, token_axes, here)
        if token_axes is None and not here.explicit_axes:
            return None
    else:
        mesh = next((m for m in map(_mesh_of, arrays) if m.size > 1), here)
    if token_axes is not None:
        return _named(function, x, token_axes, mesh)
    if mesh.size <= 1 or x.size == 0 or x.ndim < 2:
        return None
    explicit = frozenset(mesh.explicit_axes)
    if not explicit:
        return Split(mesh)
    tokens = tuple(_names(entry, explicit) for entry in _spec(x)[:-1])
    used = {axis for axes in tokens for axis in axes}
    of_columns = (_names(_spec(w)[dim], explicit) for w, dim in columns)
    split = next((axes for axes in of_columns if axes and not used & {*axes}), ())
    return Split(mesh, tokens, split, explicit) if used or any(map(_any_spec, arrays)) else None


def auto_mesh(a: jax.Array) -> Any:
    """Return the mesh of several devices over which XLA lays out a as it likes; None where there is none."""
    here = jax.sharding.get_abstract_mesh()
    if here.manual_axes:
        return None
    mesh = own if (own := _mesh_of(a)).size > 1 else here
    return mesh if mesh.size > 1 and not mesh.explicit_axes else None


def on_own_tokens(split: Split | None, op: TokenOp) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Return (rows, whole) -> op.run of every device's own tokens.

    rows: [*leading dims, ...], results likewise; [T, ...] where nothing is split: op.run itself.
    """
    if split is None:
        return partial(op.run, axes=())
    if split.tokens is not None:
        return partial(_mapped, op, split)
    return lambda rows, whole: _partitioned(op, split, rows["x"].ndim - 1)(rows, whole)


def _named(function: str, x: jax.Array, token_axes: Any, mesh: AbstractMesh) -> Split:
    """Return the split that `Tiling.token_axes` names."""
    entries = (token_axes,) if isinstance(token_axes, str) else token_axes
    tokens, lead = tuple(map(_names, entries)), x.shape[:-1]
    names = [axis for axes in tokens for axis in axes]
    there = ", ".join(mesh.axis_names) or "no mesh"
    if unknown := [name for name in names if name not in mesh.axis_names]:
        advice = "Call it under jax.set_mesh, or on arrays that are on the mesh."
        fail(function, "token_axes", f"axes of the mesh that is here ({there})", unknown[0], advice=advice)
    if len(tokens) > len(lead):
        rule = f"at most one entry for each of the {len(lead)} leading dims of x"
        fail(function, "token_axes", rule, f"{len(tokens)} entries", shapes=f"x is {show_shape(tuple(x.shape))}")
    for dim, (length, axes) in enumerate(zip(lead, tokens, strict=False)):
        if length % (size := math.prod(mesh.shape[axis] for axis in axes)):
            rule = f"axes whose {size} devices divide dim {dim} of x"
            fail(function, "token_axes", rule, repr(axes), shapes=f"x is {show_shape(tuple(x.shape))}")
    tokens += ((),) * (len(lead) - len(tokens))
    return Split(mesh, tokens, (), frozenset(names) | frozenset(mesh.explicit_axes))


def _not_manual(function: str, token_axes: Any, mesh: AbstractMesh) -> tuple[Axes, ...] | None:
    """Return the named axes that a `shard_map` of the caller's has left to XLA; None where there is none.

    Along the axes of the `shard_map` itself a device has its own tokens already.
    """
    entries = (token_axes,) if isinstance(token_axes, str) else token_axes or ()
    named = tuple(map(_names, entries))
    if unknown := [name for axes in named for name in axes if name not in mesh.axis_names]:
        fail(function, "token_axes", f"axes of the mesh that is here ({', '.join(mesh.axis_names)})", unknown[0])
    left = tuple(tuple(name for name in axes if name not in mesh.manual_axes) for axes in named)
    return left if any(left) else None


def as_typed(primal: jax.Array, d: jax.Array) -> jax.Array:
    """Return a gradient with the sharding of its primal's type: on Explicit axes the two have to agree."""
    sharding = jax.typeof(primal).sharding
    same = jax.typeof(d).sharding.spec == sharding.spec
    return d if same or not sharding.mesh.explicit_axes else jax.sharding.reshard(d, sharding)


def _on_device(
    op: TokenOp, tokens: Axes, columns: Axes, lead: int, rows: Arrays, whole: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the work of one device, whose parts are summed over the axes that cut them."""
    local = rows["x"].shape[:lead]
    flat = {name: a.reshape(-1, *a.shape[lead:]) for name, a in rows.items()}
    if op.numbered and tokens:
        whole = whole | {"device": lax.axis_index(tokens)}
    results, sums = op.run(flat, whole, columns)
    partial = {name: a for name, a in results.items() if name in op.partial}
    if columns and partial:
        results |= lax.psum(partial, columns)
    if tokens and sums:
        sums = lax.psum(sums, tokens)
    before = math.prod(local[:-1])
    shaped = {name: a.reshape(*local[:-1], a.shape[0] // before, *a.shape[1:]) for name, a in results.items()}
    return shaped, sums


@dataclass(frozen=True)
class _Specs:
    """How the operands and results of an operation are cut."""

    op: TokenOp
    tokens: tuple[Axes, ...]
    columns: Axes

    def rows(self, name: str, ndim: int) -> P:
        rest: list[Any] = [None] * (ndim - len(self.tokens))
        if name in self.op.of_columns and self.columns:
            rest[-1] = self.columns
        return P(*(axes or None for axes in self.tokens), *rest)

    def whole(self, name: str, ndim: int) -> P:
        dim = self.op.column_dim(name)
        entries: list[Any] = [None] * ndim
        if dim is not None and self.columns:
            entries[dim] = self.columns
        return P(*entries)

    def of(self, rows: Any, whole: Any) -> tuple[dict[str, P], dict[str, P]]:
        return (
            {name: self.rows(name, a.ndim) for name, a in rows.items()},
            {name: self.whole(name, a.ndim) for name, a in whole.items()},
        )


def _mapped(op: TokenOp, split: Split, rows: Arrays, whole: Arrays) -> tuple[Arrays, Arrays]:
    """Return the work in a `shard_map` over axes that are known."""
    assert split.tokens is not None
    lead, specs = rows["x"].ndim - 1, _Specs(op, split.tokens, split.columns)
    run = partial(_on_device, op, split.token_axes, split.columns, lead)
    given = specs.of(rows, whole)
    # Results have as many dims whatever is here: those of a device's rows are made for no weight split.
    with jax.sharding.use_abstract_mesh(split.on_device):
        forms = jax.eval_shape(partial(_unsplit, op, lead), _own_shapes(split, rows), shapes(whole))
    if split.mesh.explicit_axes:
        place = partial(jax.tree.map, lambda a, spec: jax.sharding.reshard(a, NamedSharding(split.mesh, spec)))
        rows, whole = place((rows, whole), given)
    mapped = jax.shard_map(
        run,
        mesh=split.mesh,
        in_specs=given,
        out_specs=specs.of(*forms),
        axis_names=set(split.manual),
        check_vma=split.typed,
    )
    if len(split.manual) < len(split.mesh.axis_names):  # outside of any jit JAX takes such specs for those of all axes
        mapped = jax.jit(mapped)
    found: tuple[Arrays, Arrays] = mapped(rows, whole)
    return found


def _own_shapes(split: Split, rows: Arrays) -> Any:
    """Return the shapes of a device's own part of the rows."""
    parts = [_size(split.mesh, axes) for axes in split.tokens or ()]

    def own(a: jax.Array) -> jax.ShapeDtypeStruct:
        lead = [length // n for length, n in zip(a.shape, parts, strict=False)]
        return jax.ShapeDtypeStruct((*lead, *a.shape[len(parts) :]), a.dtype)

    return jax.tree.map(own, rows)


def shapes(arrays: Any) -> Any:
    """Return shapes and dtypes of arrays, without how they are cut."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)


def _unsplit(op: TokenOp, lead: int, rows: Arrays, whole: Arrays) -> tuple[Arrays, Arrays]:
    """Return the work on all tokens, left to XLA."""
    return _on_device(op, (), (), lead, rows, whole)


def _partitioned(op: TokenOp, split: Split, lead: int) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Return the work as an operation that the partitioner asks how to cut.

    A batch of it (`jax.vmap`) has one more leading dim where it can; otherwise, and for a derivative of a derivative, it is
    the loop over all tokens, left to XLA.
    """
    unsplit = partial(_unsplit, op, lead)
    # The partitioner asks from a thread of its own, where what `with jax.enable_x64(True)` says does not hold.
    settings = tuple(getattr(jax.config, name) for name in ("jax_enable_x64", "jax_numpy_dtype_promotion"))

    @jax.custom_jvp
    @jax.custom_batching.custom_vmap
    def run(rows: Arrays, whole: Arrays) -> tuple[Arrays, Arrays]:
        found = custom_partitioning(unsplit)
        forms = jax.eval_shape(unsplit, rows, whole)
        found.def_partition(
            partial(_partition, op, lead, settings),
            partial(_shardings_of_results, op, lead),
            sharding_rule=_rule(op, lead, (rows, whole), forms),
        )
        return found(rows, whole)

    @run.fun.def_vmap
    def _batch(size: int, batched: Any, rows: Arrays, whole: Arrays) -> Any:
        batched = tuple(batched)  # JAX hands over a list of what stands for the arguments
        has, forms = jax.tree.map(bool, batched), jax.eval_shape(unsplit, *_of_one(batched, rows, whole))
        if op.numbered or any(has[1].values()) or forms[1]:
            dims = jax.tree.map(lambda has: 0 if has else None, batched)
            return jax.vmap(unsplit, dims, axis_size=size)(rows, whole), jax.tree.map(lambda _: True, forms)
        rows = {name: a if has[0][name] else jnp.broadcast_to(a[None], (size, *a.shape)) for name, a in rows.items()}
        return _partitioned(op, split, lead + 1)(rows, whole), jax.tree.map(lambda _: True, forms)

    run.defjvp(partial(jax.jvp, unsplit))
    return run


def _of_one(batched: Any, rows: Arrays, whole: Arrays) -> Any:
    """Return the shapes of one element of a batch."""
    return jax.tree.map(
        lambda has, a: jax.ShapeDtypeStruct(a.shape[1:] if has else a.shape, a.dtype), batched, (rows, whole)
    )


def _rule(op: TokenOp, lead: int, operands: Any, results: Any) -> str:
    """Return which dims of operands and results are cut alike, as an einsum of the names of dims."""
    fresh = iter(range(10_000))

    def dims(name: str, ndim: int, tokens: bool) -> str:
        first = [f"t{i}" for i in range(lead)] if tokens else []
        rest = [f"d{next(fresh)}" for _ in range(ndim - len(first))]
        if tokens and name in op.of_columns:
            rest[-1] = "c"
        dim = None if tokens else op.column_dim(name)
        if dim is not None:
            rest[dim] = "c"
        return " ".join([*first, *rest])

    def side(rows: Any, whole: Any) -> str:
        # In the order of the flattened dictionaries.
        return ", ".join(
            [dims(name, rows[name].ndim, True) for name in sorted(rows)]
            + [dims(name, whole[name].ndim, False) for name in sorted(whole)]
        )

    return f"{side(*operands)} -> {side(*results)}"


def _cut(op: TokenOp, lead: int, rows: Any, whole: Any) -> _Specs:
    """Return how the operands of an operation are cut, from how they come: evenly, and no axis twice."""
    mesh = _physical(rows, whole)
    size = partial(_size, mesh)
    used: set[str] = set()
    tokens = []
    for dim in range(lead):
        lengths = [a.shape[dim] for a in rows.values()]
        asked = (_names(_given(rows[name])[dim]) for name in ("x", *rows))
        axes = next((axes for axes in asked if axes and not used & {*axes}), ())
        while axes and any(length % size(axes) for length in lengths):
            axes = axes[:-1]
        used.update(axes)
        tokens.append(axes)
    columns: Axes = ()
    parts = [(a, op.column_dim(name)) for name, a in whole.items()]
    lengths = [a.shape[dim] for a, dim in parts if dim is not None]
    for a, dim in parts:
        axes = () if dim is None else _names(_given(a)[dim])
        if axes and not used & {*axes} and all(length % (size(axes) * op.multiple) == 0 for length in lengths):
            columns = axes
            break
    return _Specs(op, tuple(tokens), columns)


def _partition(op: TokenOp, lead: int, settings: tuple[Any, ...], mesh: Mesh, operands: Any, results: Any) -> Any:
    """Return what `custom_partitioning` asks for: the mesh, the work of one device, and how results and operands are cut."""
    specs = _cut(op, lead, *operands)
    token_axes = tuple(axis for axes in specs.tokens for axis in axes)

    def run(rows: Arrays, whole: Arrays) -> tuple[Arrays, Arrays]:
        with jax.enable_x64(settings[0]), jax.numpy_dtype_promotion(settings[1]):
            return _on_device(op, token_axes, specs.columns, lead, rows, whole)

    place = partial(jax.tree.map, partial(NamedSharding, mesh))
    return mesh, run, place(specs.of(*results)), place(specs.of(*operands))


def _shardings_of_results(op: TokenOp, lead: int, mesh: Mesh, operands: Any, results: Any) -> Any:
    return jax.tree.map(partial(NamedSharding, mesh), _cut(op, lead, *operands).of(*results))


def _physical(rows: Any, whole: Any) -> Mesh:
    return next(a.sharding.mesh for a in jax.tree.leaves((rows, whole)))


def _given(a: Any) -> Sequence[Any]:
    spec = a.sharding.spec
    return (*spec, *(None,) * (a.ndim - len(spec)))


def _size(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _mesh_of(a: jax.Array) -> AbstractMesh:
    return jax.typeof(a).sharding.mesh


def _spec(a: jax.Array) -> Sequence[Any]:
    spec = jax.typeof(a).sharding.spec
    return (*spec, *(None,) * (a.ndim - len(spec)))


def _any_spec(a: jax.Array) -> bool:
    return any(entry is not None for entry in _spec(a))


def _names(entry: Any, among: Collection[str] | None = None) -> Axes:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if among is None or name in among)

"""Which dim of a parameter is split over which mesh axis: logical names of dims, one table a model class, metadata.

And of an optimizer's state, which lies with the parameters that it is of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import NamedSharding

from shared_specs.errors import fail
from shared_specs.plans.checks import TensorSizes

Path = tuple[Any, ...]
Names = tuple[str | None, ...]
SplitOver = Literal["shard", "tensor"]

# Logical dim -> what splits it: the axes of fully-sharded data parallelism, the axis of tensor parallelism, or nothing.
LOGICAL: dict[str, SplitOver | None] = {
    "layers": None,
    "hidden": "shard",
    "intermediate": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "vocab": "tensor",
    "norm": None,
}
# A dim of this name that the tensor axis does not divide is kept whole on each of its devices.
UNEVEN = ("vocab",)


@dataclass(frozen=True, kw_only=True)
class ModelRules:
    """How `parallelize` treats a class of models. Extend the table with `register_rules`.

    Args:
        axes: pattern -> logical names of a parameter's dims, None for a dim without a name. The first pattern that matches the
            dotted path ("layers.*.w_up", by fnmatch) and has the parameter's number of dims wins. Sharding metadata of the
            parameter takes precedence.
        logical: logical names in addition to those of LOGICAL, or other splits for those.
        loss: loss(model, batch, mapped) -> (sum over this device's share of the batch, the divisor), written for
            `jax.shard_map` over the whole mesh (`tiled_jax.plans.decoder` is an example). The parameters of the model are this
            device's parts; `plans/data.py` gathers them. None: the model's own code runs, tensor parallelism is left to XLA,
            and `parallelize` needs a loss_fn.
        sizes: returns the sizes of a model that tensor parallelism divides.
        check: raises UnsupportedError for a model of the class that `loss` does not support; None: it supports all.
    """

    axes: Mapping[str, Names]
    logical: Mapping[str, SplitOver | None] = field(default_factory=dict)
    loss: Callable[..., tuple[Any, Any]] | None = None
    sizes: Callable[[Any], TensorSizes] | None = None
    check: Callable[[Any], None] | None = None


_RULES: dict[type, ModelRules] = {}
_NONE = ModelRules(axes={})


def register_rules(model: type[nnx.Module], rules: ModelRules) -> None:
    """Make `parallelize` use `rules` for models of this class and of classes derived from it.

    Example:
        >>> class Block(nnx.Module):
        ...     pass
        >>> register_rules(Block, ModelRules(axes={"*.w_up": ("hidden", "intermediate")}))
    """
    _RULES[model] = rules


def rules_of(model: nnx.Module) -> ModelRules:
    """Return the rules of the nearest class in the model's line, or ones that say nothing."""
    return next((_RULES[base] for base in type(model).__mro__ if base in _RULES), _NONE)


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The axes of a mesh by what they do. `batch` split the sequences of a batch, `shard` the parameters.

    `context` split the tokens of a sequence: round `ring` keys and values are sent, along `heads` tokens are exchanged for
    heads. `size` has the number of devices along each.
    """

    batch: tuple[str, ...]
    shard: tuple[str, ...]
    context: tuple[str, ...]
    ring: str | None
    heads: str | None
    tensor: str | None
    size: Mapping[str, int]

    @property
    def data(self) -> tuple[str, ...]:
        """Return every axis along which the tokens differ before tensor parallelism."""
        return (*self.batch, *self.context)

    def ranks(self, axes: tuple[str, ...]) -> int:
        """Devices along several axes together."""
        count = 1
        for axis in axes:
            count *= self.size[axis]
        return count


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives. Dims count from the end, so that they hold for one of several stacked layers too.

    Args:
        shard_dim, tensor_dim: the dim that the shard axes and the one that the tensor axis split, or None.
        dims: of one layer's parameter.
    """

    shard_dim: int | None
    tensor_dim: int | None
    dims: int

    def spec(self, ndim: int, axes: MeshAxes, *, tensor: bool = True) -> tuple[Any, ...]:
        """Return the arguments of PartitionSpec for an array of `ndim` dims; without `tensor` of the other axes alone."""
        entries: list[tuple[str, ...]] = [()] * ndim
        if self.shard_dim is not None and axes.shard:
            entries[self.shard_dim] = axes.shard
        if self.tensor_dim is not None and axes.tensor is not None and tensor:
            entries[self.tensor_dim] = (*entries[self.tensor_dim], axes.tensor)
        return tuple(None if not e else e[0] if len(e) == 1 else e for e in entries)


def placement_of(
    function: str, path: Path, shape: tuple[int, ...], metadata: Any, rules: ModelRules, axes: MeshAxes
) -> Placement:
    """Return the placement of one parameter: by its metadata, by the rules, or the longest dim that the shard axes divide."""
    name = ".".join(map(str, path))
    names = _names(function, name, len(shape), metadata, rules)
    if names is None:
        stacked = int(
            any(each[0] == "layers" and pattern.startswith(f"{path[0]}.") for pattern, each in rules.axes.items())
        )
        return Placement(_longest(shape[stacked:], axes), None, len(shape) - stacked)
    logical: dict[str, SplitOver | None] = {**LOGICAL, **rules.logical}
    splits: dict[str, int] = {}
    for index, dim in enumerate(names):
        split = _split(function, name, dim, logical, axes)
        if split is None or (
            split == "tensor" and dim in UNEVEN and axes.tensor and shape[index] % axes.size[axes.tensor]
        ):
            continue
        if split in splits:
            fail(function, name, f"split along one dim by the {split} axes", names)
        splits[split] = index - len(shape)
    placement = Placement(splits.get("shard"), splits.get("tensor"), sum(dim != "layers" for dim in names))
    _check_divides(function, name, shape, placement, axes)
    return placement


def _names(function: str, name: str, dims: int, metadata: Any, rules: ModelRules) -> Names | None:
    if metadata is not None:
        names = tuple(metadata)
        return (None,) * (dims - len(names)) + names
    matching = [names for pattern, names in rules.axes.items() if fnmatchcase(name, pattern)]
    found = next((names for names in matching if len(names) == dims), None)
    if matching and found is None:
        fail(function, name, f"of {len(matching[0])} dims, as the rules name them", dims)
    return found


def _split(
    function: str, name: str, dim: Any, logical: Mapping[str, SplitOver | None], axes: MeshAxes
) -> SplitOver | None:
    """Return the split of a dim of this name: a logical one or, in metadata, a mesh axis itself."""
    if dim is None:
        return None
    if dim in logical:
        return logical[dim]
    if dim == axes.tensor:
        return "tensor"
    if dim == axes.shard or (dim,) == axes.shard:
        return "shard"
    known = ", ".join((*logical, *axes.shard, *([axes.tensor] if axes.tensor else [])))
    fail(function, f"a dim of {name}", f"one of {known}", repr(dim), advice="Add it to the model's rules.")


def _check_divides(function: str, name: str, shape: tuple[int, ...], placement: Placement, axes: MeshAxes) -> None:
    for dim, over in (
        (placement.shard_dim, axes.shard),
        (placement.tensor_dim, (axes.tensor,) if axes.tensor else ()),
    ):
        if dim is None or not over:
            continue
        both = (*over, axes.tensor) if over == axes.shard and dim == placement.tensor_dim and axes.tensor else over
        ranks = axes.ranks(both)
        if shape[dim] % ranks:
            rule = f"a multiple of the {ranks} devices of the mesh axes {', '.join(both)}"
            fail(function, f"dim {len(shape) + dim} of {name}", rule, shape[dim], advice="Take another mesh.")


def _longest(shape: tuple[int, ...], axes: MeshAxes) -> int | None:
    """Return the longest dim that the shard axes divide; None where there is none."""
    ranks = axes.ranks(axes.shard)
    fitting = [dim for dim, size in enumerate(shape) if size and size % ranks == 0]
    return max(fitting, key=lambda dim: shape[dim]) - len(shape) if fitting and axes.shard else None


def as_parameters(state: Any, parameters: Any, whole: NamedSharding) -> Any:
    """Return the shapes of an optimizer's state with their shardings.

    An array whose place in the state ends with the place of a parameter, and that has its shape, lies as the parameter does;
    any other is whole on every device. So a parameter may have no state (`optax.masked`, `multi_transform`), or one of
    another rank (`adafactor`).

    Args:
        state, parameters: pytrees of jax.ShapeDtypeStruct, the parameters' with shardings.
    """
    of_place = dict(jax.tree_util.tree_leaves_with_path(parameters))

    def placed(path: tuple[Any, ...], a: Any) -> Any:
        # The longest place first: that of one parameter may end that of another.
        ends = (of_place.get(path[start:]) for start in range(len(path)))
        like = next((found for found in ends if found is not None), None)
        sharding = whole if like is None or like.shape != a.shape else like.sharding
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(placed, state)

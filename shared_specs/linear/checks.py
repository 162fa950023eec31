"""What a tiled linear layer must satisfy before any work is done, with one text for both halves."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from shared_specs.collectives.partitions import bounds
from shared_specs.config import HalfNames
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type, show_shape


def check_tiled_linear(
    function: str, in_features: int, out_features: int, in_splits: object, out_splits: object, **flags: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of input and output splits (`partitions.bounds`); SpecError where a split would hold nothing.

    flags: the arguments that are True or False.
    """
    checks.check_sizes(function, {"in_features": in_features, "out_features": out_features})
    checks.check_flags(function, **flags)
    sizes: list[tuple[int, ...]] = []
    for kind, features, splits in (("in", in_features, in_splits), ("out", out_features, out_splits)):
        if not checks.is_integer(splits):
            fail_type(function, f"{kind}_splits", "an integer", type(splits).__name__)
        if not 1 <= splits <= features:
            shapes = f"{kind}_features is {features}"
            fail(function, f"{kind}_splits", f"in [1, {features}]", splits, shapes=shapes)
        edges = bounds(features, splits)
        sizes.append(tuple(stop - start for start, stop in pairwise(edges)))
    return sizes[0], sizes[1]


def check_linear_class(function: str, linear_cls: object, linear_args: object, passed: Sequence[str]) -> None:
    """Check the class, and its keyword arguments, that TiledLinear makes tiles of.

    `passed`: the keyword arguments that TiledLinear itself gives to `linear_cls`.

    Raises:
        SpecError: linear_args has one of `passed`.
        TypeError: the class cannot be called, or linear_args is no mapping.
    """
    if linear_cls is not None and not callable(linear_cls):
        fail_type(function, "linear_cls", "a class or None", type(linear_cls).__name__)
    if linear_args is None:
        return
    if not isinstance(linear_args, Mapping):
        fail_type(function, "linear_args", "a mapping or None", type(linear_args).__name__)
    for name in passed:
        if name in linear_args:
            fail(function, "linear_args", f"without {', '.join(passed)}", repr(name), advice=f"{function} passes it.")


def check_linear_input(function: str, shape: tuple[int, ...], in_features: int) -> None:
    """Check that x, given as one array, is [..., in_features].

    Raises:
        SpecError: its last dim is another one.
    """
    if len(shape) < 1 or shape[-1] != in_features:
        fail(function, "x", f"[..., {in_features}], the input size", show_shape(shape))


def check_linear_parts(function: str, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
    """Check x given as a sequence of its input splits: [..., sizes[i]] each, with equal leading dims.

    Raises:
        SpecError: there is another number of them, or a shape differs.
    """
    if len(shapes) != len(sizes):
        fail(function, "x", f"{len(sizes)} arrays, one for each input split", len(shapes))
    for part, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if shape != (*shapes[0][:-1], size):
            want = show_shape((*shapes[0][:-1], size)) if part else f"[..., {size}]"
            if part or shape[-1:] != (size,):
                fail(function, f"x[{part}]", want, show_shape(shape))


def check_linear_params(
    function: str,
    prefix: str,
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
    *,
    in_features: int,
    out_features: int,
    has_bias: bool,
    names: HalfNames,
) -> None:
    """Check a whole weight and bias that tiles are copied from; their names in messages start with `prefix`.

    Raises:
        SpecError: a shape is another one, or a bias is there on one side only.
    """
    want = names.weight_shape(in_features, out_features)
    if weight != want:
        fail(function, f"{prefix}weight", f"{names.layout} = {show_shape(want)}", show_shape(weight))
    if bias is None and has_bias:
        fail(function, f"{prefix}bias", "given, as the tiles have one", None)
    if bias is not None and not has_bias:
        fail(function, f"{prefix}bias", "None, as the tiles have none", show_shape(bias))
    if bias is not None and bias != (out_features,):
        fail(function, f"{prefix}bias", show_shape((out_features,)), show_shape(bias))

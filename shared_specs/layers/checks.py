"""What the parallel linear layers and the embedding require of their options and shapes, before anything is sent."""
# What users hand over is looked at whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false, reportUnnecessaryComparison=false

from collections.abc import Mapping
from dataclasses import fields

from shared_specs.collectives.checks import check_dim, check_split_sizes
from shared_specs.config import HalfNames, ParallelLinearOptions
from shared_specs.core.checks import FLOAT_DTYPES, Operand, check_count, check_flags
from shared_specs.errors import fail, fail_type, show_shape


def check_linear_options(
    function: str,
    options: object,
    *,
    kind: str,
    sequence_parallel: bool = False,
    group_given: bool = True,
    unused: Mapping[str, str] | None = None,
) -> ParallelLinearOptions:
    """Return the options of a "column" or "row" parallel linear layer, once each has its kind and a use.

    Args:
        group_given: whether the caller names the group, as a layer of an expert has to.
        unused: fields that a half has no use for and refuses unless left at their defaults -> why.
    Raises:
        SpecError: an option has no use here, or is out of range.
        TypeError: an option is of the wrong kind.
    """
    if not isinstance(options, ParallelLinearOptions):
        fail_type(function, "options", "a ParallelLinearOptions", type(options).__name__)
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(field.default, bool):
            check_flags(function, **{f"options.{field.name}": value})
        if unused and field.name in unused and value != field.default:
            fail(function, f"options.{field.name}", f"left at {field.default}", value, advice=unused[field.name])
    if isinstance(options.sequence_dim, bool) or not isinstance(options.sequence_dim, int):
        fail_type(function, "options.sequence_dim", "an integer", type(options.sequence_dim).__name__)
    if options.stride is None:
        fail_type(function, "options.stride", "an integer", "None")
    check_count(function, "options.stride", options.stride)
    limit = options.wgrad_deferral_limit
    if isinstance(limit, bool) or not isinstance(limit, int):
        fail_type(function, "options.wgrad_deferral_limit", "an integer", type(limit).__name__)
    if limit < 0 or (limit and not options.defer_weight_grad):
        rule = ">= 0" if limit < 0 else "0 without options.defer_weight_grad"
        fail(function, "options.wgrad_deferral_limit", rule, limit)
    if options.disable_grad_reduce and kind == "row":
        advice = "The input gradient of a row-parallel layer is never a partial sum."
        fail(function, "options.disable_grad_reduce", "False", True, advice=advice)
    if options.disable_grad_reduce and sequence_parallel:
        advice = "The gradient of a rank's tokens is the sum over the ranks."
        fail(function, "options.disable_grad_reduce", "False with sequence_parallel", True, advice=advice)
    if options.explicit_expert_comm:
        check_explicit(function, sequence_parallel=(sequence_parallel, False))
    if options.is_expert and not group_given:
        advice = "An expert's layers are split over another group than the rest of the model."
        fail(function, "group", "given with options.is_expert", None, advice=advice)
    return options


def check_explicit(function: str, **arguments: tuple[object, object]) -> None:
    """Check that, with options.explicit_expert_comm, no argument asks the layer for a collective.

    `arguments`: name -> (value, the value that asks for none).

    Raises:
        SpecError: one does.
    """
    advice = "The caller makes the collectives around an expert's layers."
    for name, (value, rule) in arguments.items():
        if value != rule:
            fail(function, name, f"{rule} with options.explicit_expert_comm", value, advice=advice)


def check_explicit_bias(function: str, options: ParallelLinearOptions, *, added: bool) -> None:
    """Check that a row layer whose output stays a partial sum adds no bias: the sum would count it once for each rank.

    Raises:
        SpecError: it does (`added`).
    """
    if options.explicit_expert_comm and added:
        advice = "Add it once, to the sum over the ranks; a module returns it with skip_bias_add."
        fail(function, "bias", "left out with options.explicit_expert_comm", "one that is added", advice=advice)


def check_parallel_linear(
    function: str, *, x: Operand, weight: Operand, bias: Operand | None, inputs: int, names: HalfNames
) -> None:
    """Check x [..., in], a weight that takes `inputs` of its features, and a bias: shapes, one floating dtype, one device.

    Raises:
        SpecError: one of them disagrees.
    """
    if len(x.shape) < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(x.shape))
    if len(weight.shape) != 2:
        fail(function, "weight", f"a matrix {names.layout}", show_shape(weight.shape))
    of_inputs = 0 if names.input_dim_first else 1
    if weight.shape[of_inputs] != inputs:
        transposed = weight.shape[1 - of_inputs] == inputs
        want = names.weight_shape(inputs, weight.shape[of_inputs if transposed else 1 - of_inputs])
        advice = f"{names.package} keeps weights {names.layout}." + (" This one is transposed." if transposed else "")
        shapes = f"x is {show_shape(x.shape)}"
        fail(function, "weight", show_shape(want), show_shape(weight.shape), shapes=shapes, advice=advice)
    if x.dtype not in FLOAT_DTYPES:
        fail(function, "x", "of dtype " + ", ".join(FLOAT_DTYPES), x.dtype)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            fail(function, name, f"of x's dtype {x.dtype}", other.dtype, advice="Cast one of them.")
        if other is not None and other.device != x.device:
            fail(function, name, f"on x's device {x.device}", other.device)


def check_bias(function: str, bias: Operand, features: int) -> None:
    """Check that bias is [features]: one number for each output feature.

    Raises:
        SpecError: it has another shape.
    """
    if bias.shape != (features,):
        fail(function, "bias", show_shape((features,)), show_shape(bias.shape))


def check_split(function: str, what: str, size: int, ranks: int, stride: int = 1) -> None:
    """Check that features can be split over the ranks, each of the `stride` parts of a fused weight by itself.

    Raises:
        SpecError: `size` is no multiple of ranks * stride.
    """
    if size % (ranks * stride):
        of = f"the {ranks} ranks it is split over" if ranks > 1 or stride == 1 else ""
        parts = f"options.stride = {stride}" if stride > 1 else ""
        both = " times ".join(words for words in (of, parts) if words)
        fail(function, what, f"a multiple of {both}", size)


def check_sequence_dim(
    function: str, dim: object, sizes: object, shape: tuple[int, ...], ranks: int
) -> tuple[int, tuple[int, ...] | None]:
    """Return options.sequence_dim counted from the front, and the sizes of every rank's part or None for equal ones.

    Raises:
        SpecError: it is the last dim or out of range, or the sizes are wrong.
        TypeError: one of them is of the wrong kind.
    """
    found = check_dim(function, dim, shape)
    if found == len(shape) - 1:
        fail(function, "options.sequence_dim", "a dim of tokens", dim, shapes=f"x is {show_shape(shape)}")
    return found, None if sizes is None else check_split_sizes(function, "split_sizes", sizes, ranks)


def check_ids(function: str, ids: Operand, weight: Operand) -> None:
    """Check the operands of an embedding: ids are integers, weight is a matrix [entries, H].

    Raises:
        SpecError: ids are no int32 or int64, or weight has no two dims.
    """
    if ids.dtype not in ("int32", "int64"):
        fail(function, "ids", "int32 or int64", ids.dtype)
    if len(weight.shape) != 2:
        fail(function, "weight", "a matrix [entries, H]", show_shape(weight.shape))

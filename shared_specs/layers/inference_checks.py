"""What the fused layers of inference require: tokens of ranks, shapes of norms and residuals, which path is asked for."""

from collections.abc import Mapping

from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.checks import check_even, check_padded_part, check_split_sizes, check_total
from shared_specs.core.checks import Operand
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.checks import check_sequence_dim

# How a reduce-scatter, the work on the rows in between and an all-gather are done: one after the other, or as one kernel
# over symmetric memory. "auto" takes the best that can run.
PATHS = ("auto", "collectives", "symmetric_memory")


def check_path(function: str, path: object, reasons: Mapping[str, str | None]) -> str:
    """Return the path to take.

    `reasons`: path -> why it cannot run here, or None where it can.

    Raises:
        SpecError: there is no path of this name.
        UnsupportedError: the named path cannot run here.
    """
    if path not in PATHS:
        fail(function, "path", "one of " + ", ".join(PATHS), repr(path))
    if path == "auto":
        fused = reasons.get("symmetric_memory", "") is None
        return "symmetric_memory" if fused else "collectives"
    reason = reasons.get(str(path))
    if reason is not None:
        text = error_text(function, "path", "usable here", repr(path), advice=f'{reason} Pass path="auto".')
        raise UnsupportedError(text)
    return str(path)


def check_norm(function: str, norm_weight: Operand, features: int, like: Operand, eps: object) -> None:
    """Check the weight of a norm, [features] in the dtype of x, and the number under its root.

    Raises:
        SpecError: the shape or dtype differs, or eps is negative.
        TypeError: eps is no number.
    """
    if norm_weight.shape != (features,):
        fail(function, "norm_weight", show_shape((features,)), show_shape(norm_weight.shape))
    if norm_weight.dtype != like.dtype:
        fail(function, "norm_weight", f"of x's dtype {like.dtype}", norm_weight.dtype, advice="Cast one of them.")
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        fail_type(function, "eps", "a number", type(eps).__name__)
    if not eps >= 0:  # also refuses NaN
        fail(function, "eps", ">= 0", eps)


def check_own_tokens(
    function: str, sequence_parallel: bool, sizes: object, shape: tuple[int, ...], ranks: int
) -> tuple[int, ...] | None:
    """Return the number of tokens of every device, or None where each has as many as x has rows (tiled_jax).

    x has one device's tokens along dim 0, padded to the longest part.

    Raises:
        SpecError: the sizes disagree with x or with the devices.
        TypeError: they are no sequence of integers.
    """
    if sizes is None:
        return None
    if not sequence_parallel:
        return sequence_tokens(function, False, sizes, tokens=0, ranks=ranks, rank=None, x=shape)
    found = check_split_sizes(function, "split_sizes", sizes, ranks)
    check_padded_part(function, "split_sizes", found, shape, 0)
    return found


def check_all_tokens(function: str, sizes: object, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the number of tokens of every rank, where x has the tokens of all of them along dim 0.

    Raises:
        SpecError: they do not add up to the rows of x, or equal parts do not divide them.
        TypeError: the sizes are no sequence of integers.
    """
    _, found = check_sequence_dim(function, 0, sizes, shape, ranks)
    if found is None:
        check_even(function, shape, 0, ranks)
        return (shape[0] // ranks,) * ranks
    check_total(function, "split_sizes", found, shape, 0)
    return found


def check_residual(
    function: str, residual: Operand, shape: tuple[int, ...], like: Operand, *, padded: bool = False
) -> None:
    """Check this rank's rows of the residual stream: of `shape`, in the dtype of x.

    padded: rows beyond its tokens follow (tiled_jax).

    Raises:
        SpecError: the shape or the dtype is another one.
    """
    if residual.shape != shape:
        rule = f"{show_shape(shape)}, this rank's tokens{' padded to the longest part' if padded else ''}"
        fail(function, "residual", rule, show_shape(residual.shape), shapes=f"x is {show_shape(like.shape)}")
    if residual.dtype != like.dtype:
        fail(function, "residual", f"of x's dtype {like.dtype}", residual.dtype, advice="Cast one of them.")

"""What the fused layers of inference require: shapes of norms and residuals, and which path is asked for."""

from collections.abc import Mapping

from shared_specs.checks import Operand
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape

# How a reduce-scatter, the work on the rows in between and an all-gather are done: one after the other, or as one kernel
# over symmetric memory. "auto" takes the best that can run.
PATHS = ("auto", "collectives", "symmetric_memory")


def check_path(function: str, path: object, reasons: Mapping[str, str | None]) -> str:
    """The path to take; `reasons`: path -> why it cannot run here, or None where it can."""
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
    """One factor for each feature, in the dtype of x, and a number under the root."""
    if norm_weight.shape != (features,):
        fail(function, "norm_weight", show_shape((features,)), show_shape(norm_weight.shape))
    if norm_weight.dtype != like.dtype:
        fail(function, "norm_weight", f"of x's dtype {like.dtype}", norm_weight.dtype, advice="Cast one of them.")
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        fail_type(function, "eps", "a number", type(eps).__name__)
    if not eps >= 0:  # also refuses NaN
        fail(function, "eps", ">= 0", eps)


def check_residual(function: str, residual: Operand, shape: tuple[int, ...], like: Operand) -> None:
    """This rank's rows of the residual stream, in the dtype of x."""
    if residual.shape != shape:
        rule = f"{show_shape(shape)}, this rank's tokens"
        fail(function, "residual", rule, show_shape(residual.shape), shapes=f"x is {show_shape(like.shape)}")
    if residual.dtype != like.dtype:
        fail(function, "residual", f"of x's dtype {like.dtype}", residual.dtype, advice="Cast one of them.")

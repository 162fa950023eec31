"""Checks that any function has: options of a call, operands' dtypes and devices. Both halves raise the same text."""

# pyright: reportUnnecessaryIsInstance=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import numpy as np

from shared_specs.config import HalfNames, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Operand:
    """An array as the checks see it. `device` is compared, never interpreted; "" goes with any."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""


def is_one_of(value: object, allowed: Sequence[str]) -> bool:
    """Return whether a string is one of the choices; False for all else: an array is compared element by element."""
    return isinstance(value, str) and value in allowed


def check_keep(function: str, keep: object) -> None:
    """Check the fraction of shards whose gate and up are kept.

    Raises:
        SpecError: keep is outside [0, 1].
        TypeError: keep is no number.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float | np.integer | np.floating):
        fail_type(function, "keep", "a number", type(keep).__name__)
    keep = cast(float, keep)
    if not 0.0 <= keep <= 1.0:  # also refuses NaN
        fail(function, "keep", "in [0, 1]", keep, advice="It is the fraction of shards whose gate and up are kept.")


def check_flags(function: str, **flags: object) -> None:
    """Check that every flag is True or False.

    Raises:
        TypeError: one is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            fail_type(function, name, "True or False", type(value).__name__)


def check_float(function: str, name: str, dtype: str) -> None:
    """Check that the operand `name` has one of FLOAT_DTYPES.

    Raises:
        SpecError: it has another dtype.
    """
    if dtype not in FLOAT_DTYPES:
        fail(function, name, "of dtype " + ", ".join(FLOAT_DTYPES), dtype)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether value is an integer, Python's or one of NumPy's; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(
    function: str, argument: str, count: object, *, x: tuple[int, ...] | None = None, advice: str = ""
) -> None:
    """Check that a count is None or an integer >= 1.

    x: the shape that the message names. It is made into text only for an error, since a traced length cannot be.

    Raises:
        SpecError: count is below 1.
        TypeError: count is neither an integer nor None.
    """
    if count is None:
        return
    if not is_integer(count):
        fail_type(function, argument, "an integer or None", type(count).__name__)
    if count < 1:
        shapes = f"x is {show_shape(x)}" if x is not None else ""
        fail(function, argument, ">= 1", count, shapes=shapes, advice=advice)


def resolve_tiling(
    function: str,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    *,
    x: tuple[int, ...] | None = None,
    unused: Sequence[str] = ("vocab_shards",),
    token_axes: bool = False,
) -> Tiling:
    """Return the tiling arguments as one checked `Tiling`, from the short form or the long one, never both.

    `unused` names the fields that the function has no use for: they must be left at their defaults. `token_axes`: whether it
    can cut tokens along mesh axes by itself.

    Raises:
        SpecError: a value is out of range, both forms are given, or a field is given that the function has no use for.
        TypeError: an argument is of the wrong kind.
    """
    if tiling is not None:
        if not isinstance(tiling, Tiling):
            fail_type(function, "tiling", "a Tiling or None", type(tiling).__name__)
        if num_shards is not None or keep:
            short = "num_shards" if num_shards is not None else "keep"
            fail(function, short, "left out when tiling is given", num_shards if num_shards is not None else keep)
    else:
        tiling = Tiling(num_shards=num_shards, keep=keep)
    advice = "Pass num_shards=None to let the plan choose."
    check_count(function, "num_shards", tiling.num_shards, x=x, advice=advice)
    check_count(function, "shard_tokens", tiling.shard_tokens, x=x)
    check_count(function, "memory_budget", tiling.memory_budget, x=x, advice="It is a number of bytes.")
    check_keep(function, tiling.keep)
    check_count(function, "vocab_shards", tiling.vocab_shards, x=x)
    check_flags(function, deterministic=tiling.deterministic)
    check_token_axes(function, tiling.token_axes, token_axes)
    for name in unused:
        if getattr(tiling, name):
            fail(function, name, "left out", getattr(tiling, name), advice="This function has no use for it.")
    given = [name for name in ("num_shards", "shard_tokens", "memory_budget") if getattr(tiling, name) is not None]
    if len(given) > 1:
        fail(function, "tiling", "given one of num_shards, shard_tokens, memory_budget", " and ".join(given))
    return _of_python_numbers(tiling)


def _of_python_numbers(tiling: Tiling) -> Tiling:
    """Return the tiling with Python's numbers in the place of NumPy's, which are no part of a plan."""
    names = ("num_shards", "shard_tokens", "memory_budget", "vocab_shards", "keep")
    numbers: dict[str, object] = {name: getattr(tiling, name) for name in names}
    found: dict[str, Any] = {name: value.item() for name, value in numbers.items() if isinstance(value, np.number)}
    return replace(tiling, **found) if found else tiling


def check_token_axes(function: str, axes: object, usable: bool) -> None:
    """Check that `axes` is an axis name, or a tuple of a name, a tuple of names or None for each leading dim of x.

    Raises:
        SpecError: the function does not cut tokens along axes, or an axis is named twice.
        TypeError: an entry is no name.
    """
    if axes is None:
        return
    if not usable:
        advice = "It is for tiled_mlp, tiled_moe and tiled_linear_cross_entropy of tiled_jax."
        fail(function, "token_axes", "left out", repr(axes), advice=advice)
    names = [name for entry in _entries(axes) for name in _entries(entry)]
    if wrong := [name for name in names if name is not None and not isinstance(name, str)]:
        rule = "a name, or a tuple of names, tuples of names and None"
        fail_type(function, "token_axes", rule, f"{type(wrong[0]).__name__} in {axes!r}")
    given = [name for name in names if name is not None]
    if len({*given}) < len(given):
        fail(function, "token_axes", "each axis once", repr(axes))


def _entries(value: object) -> tuple[object, ...]:
    return cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)


def check_backend(function: str, backend: object, names: HalfNames, reasons: Mapping[str, str | None]) -> None:
    """Check that a backend is known and can run here.

    `reasons[name]` says why a backend cannot run here; None where it can.

    Raises:
        SpecError: the half has no backend of this name.
        UnsupportedError: the backend cannot run here.
    """
    if not is_one_of(backend, names.backends):
        fail(function, "backend", "one of " + ", ".join(names.backends), repr(backend))
    reason = reasons.get(str(backend))
    if reason is not None:
        raise UnsupportedError(
            error_text(function, "backend", "usable here", repr(backend), advice=f'{reason} Pass backend="auto".')
        )


def check_deterministic(function: str, tiling: Tiling, refused: str | None) -> None:
    """Raise UnsupportedError where `tiling.deterministic` is asked for and `refused` says why it cannot be had."""
    if tiling.deterministic and refused is not None:
        raise UnsupportedError(error_text(function, "deterministic", "False here", True, advice=refused))


def check_deterministic_shards(function: str, plan: ShardPlan) -> None:
    """Raise UnsupportedError where a loop that computes the shorter last shard first cannot sum over shards in token order."""
    if len(plan) > 1 and plan.tokens % plan.shard_tokens:
        raise UnsupportedError(
            error_text(
                function,
                "the length of a shard",
                "a divisor of the number of tokens for deterministic gradients of weights",
                plan.shard_tokens,
                shapes=f"there are {plan.tokens} tokens",
                advice=f"Pass a shard_tokens that divides them and is a multiple of {KERNEL_MULTIPLE}, or num_shards=1.",
            )
        )


def check_weight(
    function: str, name: str, weight: Operand, inputs: tuple[str, int], outputs: tuple[str, int], names: HalfNames
) -> None:
    """Check that the matrix `name` has the sizes `inputs` and `outputs`, each (label, size), in the half's layout.

    Raises:
        SpecError: its shape is another one; a transposed matrix is named as such.
    """
    want = names.weight_shape(inputs[1], outputs[1])
    if weight.shape == want:
        return
    labels = (inputs[0], outputs[0]) if names.input_dim_first else (outputs[0], inputs[0])
    advice = f"{names.package} keeps weights {names.layout}."
    if weight.shape == want[::-1]:
        advice += " This one is transposed."
    fail(function, name, f"[{labels[0]}, {labels[1]}] = {show_shape(want)}", show_shape(weight.shape), advice=advice)


def check_kinds(function: str, x: Operand, others: Mapping[str, Operand], *, master_weights: bool) -> None:
    """Check that x is floating point and the other operands have its dtype.

    `master_weights`: float32 operands also go with a 16-bit x.

    Raises:
        SpecError: a dtype is another one.
    """
    check_float(function, "x", x.dtype)
    is_master = master_weights and x.dtype in ("bfloat16", "float16")
    for name, other in others.items():
        if other.dtype != x.dtype and not (is_master and other.dtype == "float32"):
            fail(function, name, f"of x's dtype {x.dtype}", other.dtype, advice="Cast one of them.")


def check_devices(function: str, operands: Mapping[str, Operand | None]) -> None:
    """Check that all operands whose device is known are on the device of the first one.

    Raises:
        SpecError: one is on another device.
    """
    known = [(name, each.device) for name, each in operands.items() if each is not None and each.device]
    for name, device in known[1:]:
        first, expected = known[0]
        if device != expected:
            fail(function, name, f"on {first}'s device {expected}", device)


def check_sizes(function: str, sizes: Mapping[str, object]) -> None:
    """Check that the feature counts of a module are integers >= 1.

    Raises:
        SpecError: one is below 1.
        TypeError: one is no integer.
    """
    for name, size in sizes.items():
        if not is_integer(size):
            fail_type(function, name, "an integer", type(size).__name__ if size is not None else "None")
        check_count(function, name, size)


def flat_tokens(shape: Sequence[int]) -> int:
    """T: the product of all dims but the last."""
    return math.prod(shape[:-1])


def check_param_dtype(function: str, name: str, dtype: str) -> None:
    """Check that a module's parameters can have this dtype.

    `dtype`: its name, or the text of a value that is no dtype.

    Raises:
        SpecError: it is none of FLOAT_DTYPES.
    """
    if dtype not in FLOAT_DTYPES:
        fail(function, name, "one of " + ", ".join(FLOAT_DTYPES), dtype)

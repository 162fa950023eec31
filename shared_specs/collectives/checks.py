"""What a collective requires of the shape of its input before anything is sent. Integers only, one text for both halves."""

import math
from collections.abc import Sequence
from typing import Any, cast

from shared_specs.errors import fail, fail_type, show_shape


def check_dim(function: str, dim: object, shape: tuple[int, ...], *, of: str = "x") -> int:
    """Return `dim` of the argument `of`, counted from the front.

    Raises:
        SpecError: dim is out of the range that `shape` allows.
        TypeError: dim is no integer.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        fail_type(function, "dim", "an integer", type(dim).__name__)
    dims = len(shape)
    if not -dims <= dim < dims:
        rule = f"in [-{dims}, {dims})" if dims else "left to an x with dims"
        fail(function, "dim", rule, dim, shapes=f"{of} is {show_shape(shape)}")
    return dim % dims


def check_even(
    function: str, shape: tuple[int, ...], dim: int, ranks: int, *, sizes: str = "split_sizes", of: str = "x"
) -> None:
    """Check that `dim` of the argument `of` can be cut into one equal part for each rank.

    sizes: the argument that allows unequal parts, "" where there is none.

    Raises:
        SpecError: the size of dim is no multiple of the ranks.
    """
    if shape[dim] % ranks:
        advice = f"Pass {sizes} for parts of other sizes." if sizes else "Pad it."
        rule = f"a multiple of the {ranks} ranks it is split over"
        shapes = f"{of} is {show_shape(shape)}"
        fail(function, f"dim {dim} of {of}", rule, shape[dim], shapes=shapes, advice=advice)


def check_split_sizes(function: str, argument: str, sizes: object, ranks: int) -> tuple[int, ...]:
    """Return the sizes of all ranks' parts as a tuple with one size >= 0 for each rank.

    Raises:
        SpecError: a size is negative, or there is not one for each rank.
        TypeError: they are no sequence of integers.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        fail_type(function, argument, "a sequence of integers or None", type(sizes).__name__)
    found = tuple(cast("Sequence[int]", sizes))
    for size in cast("tuple[object, ...]", found):
        if isinstance(size, bool) or not isinstance(size, int):
            fail_type(function, argument, "a sequence of integers or None", f"one with a {type(size).__name__}")
    if len(found) != ranks:
        fail(function, argument, f"of one size for each of the {ranks} ranks", list(found))
    if min(found) < 0:
        fail(function, argument, ">= 0", list(found))
    return found


def check_total(
    function: str, argument: str, sizes: tuple[int, ...], shape: tuple[int, ...], dim: int, *, of: str = "x"
) -> None:
    """Check that the sizes of all ranks' parts add up to the size of `dim` of the argument `of`.

    Raises:
        SpecError: their sum is another one.
    """
    if sum(sizes) != shape[dim]:
        rule = f"of sum {shape[dim]}, the size of dim {dim} of {of}"
        fail(function, argument, rule, f"{list(sizes)} of sum {sum(sizes)}", shapes=f"{of} is {show_shape(shape)}")


def check_part(
    function: str, argument: str, sizes: tuple[int, ...], shape: tuple[int, ...], dim: int, rank: int
) -> None:
    """Check that x, the part of `rank`, has the size along `dim` that `sizes` gives it.

    Raises:
        SpecError: it has another size.
    """
    if sizes[rank] != shape[dim]:
        rule = f"{shape[dim]} for rank {rank}, the size of dim {dim} of x"
        fail(function, argument, rule, f"{sizes[rank]} in {list(sizes)}", shapes=f"x is {show_shape(shape)}")


def check_exchange(
    function: str, output_sizes: object, input_sizes: object, shape: tuple[int, ...], ranks: int, rank: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the output and input split sizes of an all-to-all along dim 0, or (None, None) for equal parts.

    Raises:
        SpecError: only one of them is given, they do not cover the rows of x, or they disagree about the rows that stay on
            this rank.
        TypeError: they are no sequences of integers.
    """
    check_dim(function, 0, shape)
    if output_sizes is None and input_sizes is None:
        check_even(function, shape, 0, ranks, sizes="input_split_sizes and output_split_sizes")
        return None, None
    for name, sizes in (("output_split_sizes", output_sizes), ("input_split_sizes", input_sizes)):
        if sizes is None:
            fail(function, name, "given, or both left out", None)
    outputs = check_split_sizes(function, "output_split_sizes", output_sizes, ranks)
    inputs = check_split_sizes(function, "input_split_sizes", input_sizes, ranks)
    check_total(function, "input_split_sizes", inputs, shape, 0)
    if outputs[rank] != inputs[rank]:
        rule = f"{inputs[rank]} for rank {rank}, which is what it gives itself by input_split_sizes"
        fail(function, "output_split_sizes", rule, f"{outputs[rank]} in {list(outputs)}")
    return outputs, inputs


def check_padded_part(function: str, argument: str, sizes: tuple[int, ...], shape: tuple[int, ...], dim: int) -> None:
    """Check that x, one device's part padded to the longest part, is as long as that (tiled_jax).

    Raises:
        SpecError: the longest of `sizes` is not the size of `dim` of x.
    """
    if max(sizes) != shape[dim]:
        rule = f"of maximum {shape[dim]}, the size of dim {dim} of x"
        advice = "Every device holds an array of one shape: the longest part, shorter ones padded to it."
        fail(function, argument, rule, list(sizes), shapes=f"x is {show_shape(shape)}", advice=advice)


def check_exchange_of_all(
    function: str, output_sizes: object, input_sizes: object, shape: tuple[int, ...], ranks: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return, for every device of an all-to-all along dim 0, the number of rows that it sends to each device (tiled_jax).

    None where both arguments are left out: equal parts. x is padded to the longest device's rows.

    Raises:
        SpecError: only one is given, or the sizes disagree with each other or with x.
        TypeError: they are no sequences of sequences of integers.
    """
    check_dim(function, 0, shape)
    if output_sizes is None and input_sizes is None:
        check_even(function, shape, 0, ranks, sizes="input_split_sizes and output_split_sizes")
        return None
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, given_rows in (("output_split_sizes", output_sizes), ("input_split_sizes", input_sizes)):
        if given_rows is None:
            fail(function, name, "given, or both left out", None)
        rule = "a sequence with one sequence of integers for each device"
        if isinstance(given_rows, str) or not isinstance(given_rows, Sequence):
            fail_type(function, name, rule, type(given_rows).__name__)
        rows = cast("Sequence[Any]", given_rows)
        if any(isinstance(row, str) or not isinstance(row, Sequence) for row in rows):
            advice = "All devices run one program, which has to know the sizes of all of them."
            fail_type(function, name, rule, rows, advice=advice)
        if len(rows) != ranks:
            fail(function, name, f"of one sequence for each of the {ranks} devices", len(rows))
        found[name] = tuple(check_split_sizes(function, f"{name}[{rank}]", row, ranks) for rank, row in enumerate(rows))
    given = found["input_split_sizes"]
    expected = tuple(zip(*given, strict=True))
    if found["output_split_sizes"] != expected:
        rule = f"{[list(row) for row in expected]}, the columns of input_split_sizes"
        fail(function, "output_split_sizes", rule, [list(row) for row in found["output_split_sizes"]])
    check_padded_part(function, "the rows of a device by input_split_sizes", tuple(map(sum, given)), shape, 0)
    return given


def check_partitions(function: str, number: object, shape: tuple[int, ...]) -> int:
    """Return the size of each of `num_partitions` equal parts of the last dim.

    Raises:
        SpecError: they do not divide the last dim, or there is none.
        TypeError: num_partitions is no integer.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        fail_type(function, "num_partitions", "an integer", type(number).__name__)
    if not shape:
        fail(function, "tensor", "of one dim or more", show_shape(shape))
    if number < 1 or shape[-1] % number:
        fail(function, "num_partitions", f"a divisor of {shape[-1]}", number, shapes=f"tensor is {show_shape(shape)}")
    return shape[-1] // number


def check_elements(function: str, shape: tuple[int, ...], ranks: int) -> None:
    """Check that a tensor's elements, flattened, can be cut into one equal part for each rank.

    Raises:
        SpecError: their number is no multiple of the ranks.
    """
    elements = math.prod(shape)
    if elements % ranks:
        rule, shapes = f"a multiple of the {ranks} ranks they are split over", f"tensor is {show_shape(shape)}"
        fail(function, "the elements of tensor", rule, elements, shapes=shapes, advice="Pad it.")

"""Collectives with gradients: the conjugate pairs that carry activations in and out of regions split over ranks.

Letters: R ranks of the group, T tokens, H features. A group of one rank is free: x itself comes back. Everything that a
rank can know to be wrong is refused before anything is sent. Shapes and dtypes that disagree between ranks are known to no
single rank: the ranks compare them first, and all raise SpecError (`consistency`: under gloo each time, under other backends
the first time). A call that another rank never makes ends after the group's timeout, with an error that names both.
A backward makes the conjugate collective and is differentiable itself. Integers travel as well, without gradients.

Source: Megatron-LM, arXiv 1909.08053 section 3 and arXiv 2205.05198 section 4.2; what each rank gets is written down in
shared_specs/collectives/oracle.py.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shared_specs.collectives import checks
from shared_specs.errors import fail, fail_type, show_shape
from tiled_torch.collectives.conjugates import Exchange, Join, Keep, Split, Sum, SumSplit, ToHidden, ToSequence, move
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.tensors import refuse_dtensor


@not_compiled
def copy_to_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Return x unchanged; backward sums its gradient over the ranks.

    Use it in front of a column-parallel layer, where every rank uses all of x for a part of the outputs.

    Args:
        x: any shape, the same on every rank. group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        x, as a view.
    Raises:
        SpecError: the group has several dims or does not contain this rank. TypeError: x is no tensor.
        UnsupportedError: no process group has been initialised, or x is a DTensor.
    """
    return move(x, _over("copy_to_tensor_parallel_region", x, group), Keep(), Sum())


@not_compiled
def reduce_from_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Return the sum of x over the ranks; backward passes the gradient through.

    Args:
        x: any shape, a partial sum on every rank. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        The shape of x, the same on every rank.
    Numerics: 16-bit x is summed in float32 and rounded once. Any other x is summed in its own dtype, in the order of the
        backend. Every sum over ranks here follows these rules: `tiled_torch.collectives.transport`.
    Raises:
        As `copy_to_tensor_parallel_region`.
    """
    return move(x, _over("reduce_from_tensor_parallel_region", x, group), Sum(), Keep())


@not_compiled
def scatter_to_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Return this rank's slice of the last dim of x; backward gathers the gradients.

    Args:
        x: [..., H], the same on every rank, H a multiple of R. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [..., H / R].
    Raises:
        As `copy_to_tensor_parallel_region`; SpecError where R does not divide H.
    """
    over = _over("scatter_to_tensor_parallel_region", x, group)
    dim = _even_last(over, x)
    return move(x, over, Split(dim), Join(dim))


@not_compiled
def gather_from_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Concatenate the slices of all ranks along the last dim; backward keeps this rank's slice of the gradient.

    Use it if the following computation is the same on every rank. If ranks compute different things next, their gradients must
    be added: use `all_gather_last_dim_from_tensor_parallel_region`.

    Args:
        x: [..., H / R]. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [..., H], the same on every rank.
    Raises:
        As `copy_to_tensor_parallel_region`.
    """
    over = _over("gather_from_tensor_parallel_region", x, group)
    dim = checks.check_dim(over.function, -1, tuple(x.shape))
    return move(x, over, Join(dim), Split(dim))


@not_compiled
def scatter_to_sequence_parallel_region(
    x: Tensor, *, dim: int = 0, split_sizes: Sequence[int] | None = None, group: Any = None
) -> Tensor:
    """Return this rank's tokens of x; backward gathers the gradients.

    Args:
        x: [..., T, ...] with T at `dim`, the same on every rank.
        split_sizes: the number of tokens of every rank, with sum T; None: T / R each. group: as in
            `copy_to_tensor_parallel_region`.
    Returns:
        [..., T / R or split_sizes[rank], ...].
    Raises:
        As `copy_to_tensor_parallel_region`; SpecError where R does not divide T, or split_sizes do not fit.
    """
    over = _over("scatter_to_sequence_parallel_region", x, group)
    dim, sizes = _whole(over, x, dim, split_sizes)
    return move(x, over, Split(dim, sizes), Join(dim, sizes))


@not_compiled
def gather_from_sequence_parallel_region(
    x: Tensor,
    *,
    dim: int = 0,
    split_sizes: Sequence[int] | None = None,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
) -> Tensor:
    """Concatenate the tokens of all ranks.

    Args:
        x: [..., T / R or split_sizes[rank], ...] with tokens at `dim`.
        split_sizes: the number of tokens of every rank; None if all ranks have the same number. group: as in
            `copy_to_tensor_parallel_region`.
        tensor_parallel_output_grad: True: the ranks compute different things next, so backward sums and scatters the gradient.
            False: all ranks compute the same, so backward keeps this rank's tokens of the gradient.
    Returns:
        [..., T, ...], the same on every rank.
    Memory: uneven parts are padded to the longest one for the exchange: R x the longest part, in addition to the result.
    Raises:
        As `copy_to_tensor_parallel_region`; SpecError where split_sizes do not fit.
    """
    over = _over("gather_from_sequence_parallel_region", x, group)
    if not isinstance(tensor_parallel_output_grad, bool):
        kind = type(tensor_parallel_output_grad).__name__
        fail_type(over.function, "tensor_parallel_output_grad", "True or False", kind)
    dim, sizes = _part(over, x, dim, split_sizes)
    back = SumSplit(dim, sizes) if tensor_parallel_output_grad else Split(dim, sizes)
    return move(x, over, Join(dim, sizes), back)


@not_compiled
def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, *, dim: int = 0, split_sizes: Sequence[int] | None = None, group: Any = None
) -> Tensor:
    """Return this rank's tokens of the sum of x over the ranks; backward gathers the gradients.

    Args:
        x: [..., T, ...] with T at `dim`, a partial sum on every rank.
        split_sizes: the number of tokens of every rank, with sum T; None: T / R each. group: as in
            `copy_to_tensor_parallel_region`.
    Returns:
        [..., T / R or split_sizes[rank], ...].
    Numerics: as `reduce_from_tensor_parallel_region`.
    Memory: a copy of x if dim is not 0 or sizes differ; uneven sizes are padded to R x the longest part. For 16-bit x over
        more than two ranks, the received parts take as much again.
    Raises:
        As `scatter_to_sequence_parallel_region`.
    """
    over = _over("reduce_scatter_to_sequence_parallel_region", x, group)
    dim, sizes = _whole(over, x, dim, split_sizes)
    return move(x, over, SumSplit(dim, sizes), Join(dim, sizes))


@not_compiled
def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Concatenate the slices of all ranks along the last dim; backward sums the gradient and scatters it.

    Args:
        x: [..., H / R]. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [..., H], the same on every rank.
    Raises:
        As `copy_to_tensor_parallel_region`.
    """
    over = _over("all_gather_last_dim_from_tensor_parallel_region", x, group)
    dim = checks.check_dim(over.function, -1, tuple(x.shape))
    return move(x, over, Join(dim), SumSplit(dim))


@not_compiled
def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, *, group: Any = None) -> Tensor:
    """Return this rank's slice of the last dim of the sum of x over the ranks; backward gathers the gradients.

    Args:
        x: [..., H], a partial sum on every rank, H a multiple of R. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [..., H / R].
    Raises:
        As `scatter_to_tensor_parallel_region`.
    """
    over = _over("reduce_scatter_last_dim_to_tensor_parallel_region", x, group)
    dim = _even_last(over, x)
    return move(x, over, SumSplit(dim), Join(dim))


@not_compiled
def all_to_all(
    x: Tensor,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Send rows of dim 0 from every rank to every rank; backward sends the gradients back.

    Args:
        x: [rows, ...]: the rows for rank 0, then those for rank 1, and so on.
        output_split_sizes: the number of rows received from every rank, stored in rank order. input_split_sizes: the number of
            rows sent to every rank, with sum `rows`. Pass both or neither; None: rows / R each. The sizes of the receiving
            rank must match those of the sending rank. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [sum of output_split_sizes, ...].
    Raises:
        As `copy_to_tensor_parallel_region`; SpecError where sizes do not fit x, or where this rank's two sizes for itself
        differ.
    """
    over = _over("all_to_all", x, group)
    shape = tuple(x.shape)
    sizes = checks.check_exchange(over.function, output_split_sizes, input_split_sizes, shape, over.size, over.rank)
    return move(x, over, Exchange(*sizes), Exchange(*sizes[::-1]))


@not_compiled
def all_to_all_sequence_to_hidden(x: Tensor, *, group: Any = None) -> Tensor:
    """Exchange some tokens with all features for all tokens with some features; backward is the inverse exchange.

    Args:
        x: [T / R, ..., H], the same number of tokens on every rank, H a multiple of R. group: as in
            `copy_to_tensor_parallel_region`.
    Returns:
        [T, ..., H / R]: this rank's slice of the features.
    Raises:
        As `scatter_to_tensor_parallel_region`; SpecError where x has one dim.
    """
    over = _over("all_to_all_sequence_to_hidden", x, group)
    _two_dims(over, x)
    _even_last(over, x)
    return move(x, over, ToHidden(), ToSequence())


@not_compiled
def all_to_all_hidden_to_sequence(x: Tensor, *, group: Any = None) -> Tensor:
    """Exchange all tokens with some features for some tokens with all features; backward is the inverse exchange.

    Args:
        x: [T, ..., H / R], T a multiple of R. group: as in `copy_to_tensor_parallel_region`.
    Returns:
        [T / R, ..., H]: this rank's slice of the tokens.
    Raises:
        As `all_to_all_sequence_to_hidden`, with T in place of H.
    """
    over = _over("all_to_all_hidden_to_sequence", x, group)
    _two_dims(over, x)
    checks.check_even(over.function, tuple(x.shape), 0, over.size, sizes="")
    return move(x, over, ToSequence(), ToHidden())


def _over(function: str, x: Any, group: Any) -> RankGroup:
    if not isinstance(x, Tensor):
        fail_type(function, "x", "an array", type(x).__name__)
    refuse_dtensor(function, "x", x, "Convert it with to_local(), or let DTensor redistribute it.")
    return rank_group(function, group)


def _even_last(over: RankGroup, x: Tensor) -> int:
    shape = tuple(x.shape)
    dim = checks.check_dim(over.function, -1, shape)
    checks.check_even(over.function, shape, dim, over.size, sizes="")
    return dim


def _two_dims(over: RankGroup, x: Tensor) -> None:
    if x.dim() < 2:
        fail(over.function, "x", "of two dims or more, tokens first and features last", show_shape(tuple(x.shape)))


def _whole(over: RankGroup, x: Tensor, dim: int, sizes: Any) -> tuple[int, tuple[int, ...] | None]:
    """Return (dim, sizes) for an x that holds the tokens of all ranks."""
    shape = tuple(x.shape)
    dim = checks.check_dim(over.function, dim, shape)
    if sizes is None:
        checks.check_even(over.function, shape, dim, over.size)
        return dim, None
    sizes = checks.check_split_sizes(over.function, "split_sizes", sizes, over.size)
    checks.check_total(over.function, "split_sizes", sizes, shape, dim)
    return dim, sizes


def _part(over: RankGroup, x: Tensor, dim: int, sizes: Any) -> tuple[int, tuple[int, ...] | None]:
    """Return (dim, sizes) for an x that holds this rank's tokens."""
    shape = tuple(x.shape)
    dim = checks.check_dim(over.function, dim, shape)
    if sizes is None:
        return dim, None
    sizes = checks.check_split_sizes(over.function, "split_sizes", sizes, over.size)
    checks.check_part(over.function, "split_sizes", sizes, shape, dim, over.rank)
    return dim, sizes

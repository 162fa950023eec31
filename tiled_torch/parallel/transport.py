"""Data between ranks, without gradients: the one place that knows what a backend's collectives can do.

Each call returns a `Pending`, whose `wait()` gives the result; until then the data is under way and the caller may compute.
Backends move equal parts of contiguous buffers along dim 0, so that uneven parts are padded to the longest (gloo gathers
no others) and other dims are laid out before or after. One collective per call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiled_torch.parallel.groups import RankGroup

Sizes = Sequence[int] | None  # of every rank along the dim; None: equal

# Renamed in torch 2.12; the old names warn there.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. It keeps its buffers alive; `wait()` once, for the result."""

    def __init__(self, over: RankGroup, name: str, work: Any, finish: Callable[[], Tensor], keep: Any = None) -> None:
        self.over, self.name, self.work, self.finish, self.keep = over, name, work, finish, keep

    def wait(self) -> Tensor:
        if self.work is not None:
            _named(self.over, self.name, self.work.wait)
        result = self.finish()
        self.work = self.keep = None
        return result


def _done(over: RankGroup, result: Tensor) -> Pending:
    return Pending(over, "", None, lambda: result)


def _named(over: RankGroup, name: str, call: Callable[[], Any]) -> Any:
    """The call; where it fails or times out, its error says which rank waited in which collective."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{over.function}: {name} failed on rank {over.rank} of {over.size}. Every rank of the group has to make this "
            f"call with fitting shapes; one that raised an error of its own, ended or is late does not. {error}"
        ) from error


def all_reduce(over: RankGroup, x: Tensor) -> Pending:
    """The sum over the ranks, in new memory."""
    if not over.several:
        return _done(over, x)
    total = x.clone(memory_format=torch.contiguous_format)
    work = _named(over, "all-reduce", lambda: dist.all_reduce(total, group=over.group, async_op=True))
    return Pending(over, "all-reduce", work, lambda: total)


def all_reduce_(over: RankGroup, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
    """The reduction over the ranks, written over x, which is contiguous."""
    if not over.several:
        return _done(over, x)
    work = _named(over, "all-reduce", lambda: dist.all_reduce(x, op=op, group=over.group, async_op=True))
    return Pending(over, "all-reduce", work, lambda: x)


def all_gather(over: RankGroup, x: Tensor, dim: int, sizes: Sizes = None) -> Pending:
    """Every rank's part side by side along `dim`."""
    if not over.several:
        return _done(over, x)
    dim %= x.dim()
    longest = x.shape[dim] if sizes is None else max(sizes)
    part = _padded(x, dim, longest)
    flat = x.new_empty((over.size * part.shape[0], *part.shape[1:]))
    work = _named(over, "all-gather", lambda: _gather_equal(flat, part, group=over.group, async_op=True))

    def finish() -> Tensor:
        if dim == 0 and _equal(sizes):
            return flat
        parts = flat.view(over.size, *part.shape).unbind()
        if not _equal(sizes):
            parts = tuple(one.narrow(dim, 0, size) for one, size in zip(parts, sizes or (), strict=True))
        return torch.cat(parts, dim)

    return Pending(over, "all-gather", work, finish, part)


def reduce_scatter(over: RankGroup, x: Tensor, dim: int, sizes: Sizes = None) -> Pending:
    """This rank's stretch, along `dim`, of the sum over the ranks."""
    if not over.several:
        return _done(over, x)
    dim %= x.dim()
    if dim == 0 and _equal(sizes):
        given = x.contiguous()
        shape: tuple[int, ...] = (x.shape[0] // over.size, *x.shape[1:])
    else:
        cut = x.split(list(sizes) if sizes is not None else x.shape[dim] // over.size, dim) if x.shape[dim] else ()
        longest = max(sizes) if sizes is not None else x.shape[dim] // over.size
        shape = (*x.shape[:dim], longest, *x.shape[dim + 1 :])
        given = x.new_zeros((over.size, *shape))
        for rank, part in enumerate(cut):
            given[rank].narrow(dim, 0, part.shape[dim]).copy_(part)
        given = given.flatten(0, 1)
    mine = x.new_empty(shape)
    work = _named(over, "reduce-scatter", lambda: _reduce_scatter_equal(mine, given, group=over.group, async_op=True))
    size = shape[dim] if sizes is None else sizes[over.rank]
    return Pending(over, "reduce-scatter", work, lambda: mine.narrow(dim, 0, size).contiguous(), given)


def all_to_all(over: RankGroup, x: Tensor, output_sizes: Sizes = None, input_sizes: Sizes = None) -> Pending:
    """Rows of dim 0, `input_sizes[r]` of them to rank r; `output_sizes[r]` come from rank r. None: equal."""
    if not over.several:
        return _done(over, x)
    rows = x.shape[0] if output_sizes is None else sum(output_sizes)
    given, out = x.contiguous(), x.new_empty((rows, *x.shape[1:]))
    sizes = [None if one is None else list(one) for one in (output_sizes, input_sizes)]
    work = _named(
        over, "all-to-all", lambda: dist.all_to_all_single(out, given, *sizes, group=over.group, async_op=True)
    )
    return Pending(over, "all-to-all", work, lambda: out, given)


def _equal(sizes: Sizes) -> bool:
    return sizes is None or len(set(sizes)) == 1


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Contiguous x, followed along `dim` by memory that nobody reads up to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    padded = x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded

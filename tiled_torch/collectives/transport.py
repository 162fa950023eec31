"""Data between ranks, without gradients: the one place that knows what a backend's collectives can do.

Each call returns a `Pending`, whose `wait()` gives the result; until then the data is under way and the caller may compute.
Backends move equal parts of contiguous buffers along dim 0, so that uneven parts are padded to the longest (gloo gathers
no others) and other dims are laid out before or after. One collective per call, but for the sums below.

Sums of bfloat16 and float16 over more than two ranks are taken in float32 and rounded once. What a backend does itself
depends on the algorithm that it picks: a ring rounds at every hop, which is off by about sqrt(R / 2) roundings over R ranks,
where this is off by one at any number. (Two ranks add once: the backend's sum is the same.)

* A reduce-scatter is an all-to-all of the unrounded parts and a sum in rank order: one collective, the bytes of a ring,
  and a buffer as large as the given one beside it.
* An all-reduce of more than `SMALL_ELEMENTS` is that and an all-gather: the bytes of a ring again. Its first half is under
  way until the wait; the second begins there. (NVLink switches that add in the network would move half of the bytes, of
  sums that they may round: nothing lets a caller ask for float32 there. Unmeasured.)
* An all-reduce of fewer travels as float32, where the number of collectives costs more than their bytes.

What all ranks have to send alike is compared first (`consistency`): under gloo each time, under other backends the first time.
A rank that waits in vain raises an error with its rank and the call after the group's timeout, and with what the other
ranks wait in (`failures`), where the backend raises in the waiting thread: gloo does, NCCL under
TORCH_NCCL_BLOCKING_WAIT=1. NCCL's watchdog ends the process otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiled_torch.collectives.consistency import gather_equal as _gather_equal
from tiled_torch.collectives.consistency import same_collective, same_exchange
from tiled_torch.collectives.failures import run_collective
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.core.tensors import wide_dtype

Sizes = Sequence[int] | None  # of every rank along the dim; None: equal
SMALL_ELEMENTS = (
    1 << 18
)  # elements whose bytes, at hundreds of GB/s, take less time than one more collective: 1 MiB of float32

# Renamed in torch 2.12; the old name warns there.
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective of `keep` under way, which it keeps alive; `wait()` once, for the result."""

    def __init__(
        self, over: RankGroup, name: str, work: Any, finish: Callable[[], Tensor], keep: Tensor | None = None
    ) -> None:
        self.over, self.name, self.work, self.finish, self.keep = over, name, work, finish, keep

    def wait(self) -> Tensor:
        if self.work is not None:
            run_collective(self.over, self.name, self.work.wait, self.keep)
        self.work = self.keep = None
        return self.finish()


def _done(over: RankGroup, result: Tensor) -> Pending:
    return Pending(over, "", None, lambda: result)


def all_reduce(over: RankGroup, x: Tensor) -> Pending:
    """Return the sum over the ranks, in new memory."""
    if not over.several:
        return _done(over, x)
    return all_reduce_(over, x.clone(memory_format=torch.contiguous_format))


def all_reduce_(over: RankGroup, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
    """Return the reduction over the ranks, written over x, which is contiguous."""
    if not over.several:
        return _done(over, x)
    same_collective(over, "all-reduce", x, x.shape, "" if op == dist.ReduceOp.SUM else f" by {op}")
    if op == dist.ReduceOp.SUM and _rounds(over, x):
        return _all_reduce_wide(over, x)
    work = run_collective(over, "all-reduce", lambda: dist.all_reduce(x, op=op, group=over.group, async_op=True), x)
    return Pending(over, "all-reduce", work, lambda: x, x)


def all_gather(over: RankGroup, x: Tensor, dim: int, sizes: Sizes = None) -> Pending:
    """Return every rank's part side by side along `dim`."""
    if not over.several:
        return _done(over, x)
    dim %= x.dim()
    longest = x.shape[dim] if sizes is None else max(sizes)
    same_collective(over, "all-gather", x, _with(x.shape, dim, longest), _laid(dim, sizes))
    part = _padded(x, dim, longest)
    flat = x.new_empty((over.size * part.shape[0], *part.shape[1:]))
    work = run_collective(over, "all-gather", lambda: _gather_equal(flat, part, group=over.group, async_op=True), part)

    def finish() -> Tensor:
        if dim == 0 and _equal(sizes):
            return flat
        parts = flat.view(over.size, *part.shape).unbind()
        if not _equal(sizes):
            parts = tuple(one.narrow(dim, 0, size) for one, size in zip(parts, sizes or (), strict=True))
        return torch.cat(parts, dim)

    return Pending(over, "all-gather", work, finish, part)


def reduce_scatter(over: RankGroup, x: Tensor, dim: int, sizes: Sizes = None) -> Pending:
    """Return this rank's stretch, along `dim`, of the sum over the ranks."""
    if not over.several:
        return _done(over, x)
    dim %= x.dim()
    same_collective(over, "reduce-scatter", x, x.shape, _laid(dim, sizes))
    if dim == 0 and _equal(sizes):
        given = x.contiguous()
        shape: tuple[int, ...] = (x.shape[0] // over.size, *x.shape[1:])
    else:
        cut = x.split(list(sizes) if sizes is not None else x.shape[dim] // over.size, dim) if x.shape[dim] else ()
        longest = max(sizes) if sizes is not None else x.shape[dim] // over.size
        shape = _with(x.shape, dim, longest)
        given = x.new_zeros((over.size, *shape))
        for rank, part in enumerate(cut):
            given[rank].narrow(dim, 0, part.shape[dim]).copy_(part)
        given = given.flatten(0, 1)
    size = shape[dim] if sizes is None else sizes[over.rank]
    pending = _reduced_part(over, given, "reduce-scatter")
    padded = pending.finish

    def finish() -> Tensor:
        found = padded()  # never a view: fully_shard's hook on a layer's result would go lost in place
        return found if found.shape[dim] == size else found.narrow(dim, 0, size).clone()

    pending.finish = finish
    return pending


def all_to_all(over: RankGroup, x: Tensor, output_sizes: Sizes = None, input_sizes: Sizes = None) -> Pending:
    """Return rows of dim 0, `input_sizes[r]` of them to rank r; `output_sizes[r]` come from rank r. None: equal."""
    if not over.several:
        return _done(over, x)
    name, equal = "all-to-all", [x.shape[0] // over.size] * over.size
    sizes = [equal if one is None else list(one) for one in (output_sizes, input_sizes)]
    same_collective(over, name, x, ("rows", *x.shape[1:]))
    same_exchange(over, name, x, *sizes)
    given, out = x.contiguous(), x.new_empty((sum(sizes[0]), *x.shape[1:]))
    return Pending(over, name, _exchange(over, name, out, given, *sizes), lambda: out, given)


def shift(over: RankGroup, x: Tensor) -> Pending:
    """Return what the rank before this one gave, as large as contiguous x, which the next one gets; after the last comes 0."""
    if not over.several:
        return _done(over, x)
    name, out = "ring shift", torch.empty_like(x)
    same_collective(over, name, x, x.shape)
    following, before = ((over.rank + by) % over.size for by in (1, -1))
    group: Any = over.group or dist.group.WORLD
    ends = [(dist.isend, x, following), (dist.irecv, out, before)]
    calls = [dist.P2POp(kind, a, dist.get_global_rank(group, peer), over.group) for kind, a, peer in ends]
    works = run_collective(over, name, lambda: dist.batch_isend_irecv(calls), x)
    return Pending(over, name, _Several(works), lambda: out, x)


class _Several:
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def wide_sum(parts: Tensor) -> Tensor:
    """Return the sum over dim 0, taken in float32 (float64 for float64) and rounded once."""
    wide = wide_dtype(parts.dtype)
    if parts.device.type != "cpu":
        return parts.sum(0, dtype=wide).to(parts.dtype)
    first, *others = parts.unbind()  # there, torch's sum makes a float32 copy of all of it
    total = first.to(wide, copy=True)
    for other in others:
        total += other
    return total.to(parts.dtype)


def _rounds(over: RankGroup, x: Tensor) -> bool:
    """Return whether a backend may round on the way to a sum."""
    return over.size > 2 and x.dtype in (torch.bfloat16, torch.float16)


def _reduced_part(over: RankGroup, given: Tensor, name: str) -> Pending:
    """Return this rank's equal part, along dim 0, of the sum; `given` is contiguous and stays as it is until the wait."""
    shape = (given.shape[0] // over.size, *given.shape[1:])
    if _rounds(over, given):
        found = torch.empty_like(given)
        work = _exchange(over, name, found, given)
        return Pending(over, name, work, lambda: wide_sum(found.view(over.size, *shape)), given)
    mine = given.new_empty(shape)
    work = run_collective(
        over, name, lambda: _reduce_scatter_equal(mine, given, group=over.group, async_op=True), given
    )
    return Pending(over, name, work, lambda: mine, given)


def _all_reduce_wide(over: RankGroup, x: Tensor) -> Pending:
    """Return the sum in float32, written over x."""
    name = "all-reduce"
    if x.numel() <= SMALL_ELEMENTS:
        wide = x.float()
        work = run_collective(over, name, lambda: dist.all_reduce(wide, group=over.group, async_op=True), wide)
        return Pending(over, name, work, lambda: x.copy_(wide), wide)
    flat = x.view(-1)
    even = _padded(flat, 0, -(-x.numel() // over.size) * over.size)
    pending = _reduced_part(over, even, name)
    part = pending.finish

    def finish() -> Tensor:
        mine = part()
        run_collective(over, name, lambda: _gather_equal(even, mine, group=over.group, async_op=True).wait(), mine)
        if even.numel() > flat.numel():
            flat.copy_(even[: x.numel()])
        return x

    pending.finish = finish
    return pending


def _exchange(over: RankGroup, name: str, out: Tensor, given: Tensor, *sizes: Any) -> Any:
    return run_collective(
        over, name, lambda: dist.all_to_all_single(out, given, *sizes, group=over.group, async_op=True), given
    )


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _laid(dim: int, sizes: Sizes) -> str:
    """Return how parts lie side by side, as the end of what ranks compare."""
    return (f" along dim {dim}" if dim else "") + ("" if _equal(sizes) else f" in parts {list(sizes or ())}")


def _equal(sizes: Sizes) -> bool:
    return sizes is None or len(set(sizes)) == 1


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Contiguous x, followed along `dim` by memory that nobody reads up to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    padded = x.new_empty(_with(x.shape, dim, size))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded

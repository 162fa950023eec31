"""Compare the ranks' descriptions of a call before they send each other anything else.

A rank that cut its tokens in another way, or wants a gradient that the others do not, would send messages that nobody
waits for: a hang, mixed shards, or under gloo the end of the process. Two comparisons, each of one number a rank, made from
all that has to be alike:

* `agree`, of a call: whenever a group meets a combination for the first time, in a training loop's first step.
* `same_collective`, of every collective of this library: each time under gloo, where it takes less time than the calls
  around it; under other backends the first time too, since it makes the host wait for the device.

Under these backends a rank that meets a combination which others have met before is not found out here: those others no
longer compare. Where ranks then wait for each other, the errors say in what their calls differ (`failures`).

`TORCH_DISTRIBUTED_DEBUG=DETAIL` (torch 2.13: a barrier and a gather of fingerprints before every collective of the program)
does not replace them. It is there only where the user sets it before `init_process_group`; it names the shapes that ranks
were about to send, where `agree` names the argument that made them (two gloo ranks with other num_shards: "all-reduce of [4]"
and "[2]" in 900 characters, here "shard_tokens must be the same on all 2 ranks, got 4, 2."); and an exchange of which a rank
takes a row more than the other gives returns under it, with a row that nobody sent. Without either, ranks of other sizes or
dtypes end under gloo, or one of them goes on with a wrong result.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shared_specs.collectives.agreement import check_alike
from shared_specs.errors import fail, fail_with
from tiled_torch.collectives import failures
from tiled_torch.collectives.failures import run_collective
from tiled_torch.collectives.groups import RankGroup, backend_of, not_compiled, rank_group, simulated

T = TypeVar("T")
# Renamed in torch 2.12. With async_op it returns the work.
gather_equal: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_met: "weakref.WeakKeyDictionary[Any, set[Hashable]]" = weakref.WeakKeyDictionary()


def _met_in(over: RankGroup) -> set[Hashable]:
    return _met.setdefault(over.group or dist.group.WORLD, set())


@contextmanager
def first_time(over: RankGroup, what: Hashable) -> Iterator[bool]:
    """Yield whether `what` is new to a group of several ranks. It is remembered unless the body raises."""
    met = _met_in(over) if over.several else {what}
    new = what not in met
    yield new
    if new:
        met.add(what)


@not_compiled
def agree(over: RankGroup, device: torch.device, said: Mapping[str, Any]) -> None:
    """Compare this rank's description of its call with those of the others. The second time nothing is sent.

    Args:
        device: of the call's tensors, which the group's backend moves.
        said: what must be equal on all ranks, by its name in messages. Two values are equal where their repr is.
    Raises:
        SpecError: on every rank, with what each of them says of the first thing in which they differ.
    """
    if not over.several or _unreadable(over, device):
        return
    words = tuple((name, repr(value)) for name, value in said.items())
    failures.remember(over, words)
    with first_time(over, (over.function, words)) as new:
        if new:
            _compare(over, "comparison of calls", words, device)


@not_compiled
def same_collective(over: RankGroup, name: str, x: Tensor, shape: Sequence[object], extra: str = "") -> None:
    """Compare, before the collective `name`, what must be equal on all ranks: the dtype of x, `shape` and `extra`.

    shape: the sizes of x that must be equal, in elements. The ranks compare every time under
    gloo, whose process ends where sizes differ; the first time under other backends.

    Raises:
        SpecError: on every rank, with what each of them says, where they differ.
    """
    met, what = _met_in(over), (over.function, name, x.dtype, *shape, extra)
    if what in met or _unreadable(over, x.device):
        return
    words = f"{name} of {x.dtype} [{', '.join(map(str, shape))}]{extra}".replace("torch.", "")
    _compare(over, name, (("the collective", words),), x.device, x)
    if backend_of(over, x.device.type) != "gloo":
        met.add(what)


@not_compiled
def same_exchange(over: RankGroup, name: str, x: Tensor, takes: Sequence[int], gives: Sequence[int]) -> None:
    """Compare, under gloo, what each rank takes from every rank with what that one gives.

    Raises:
        SpecError: on every rank, where the two differ.
    """
    if backend_of(over, x.device.type) != "gloo":
        return
    mine = torch.tensor([*takes, *gives], device=x.device)
    found = _everywhere(over, name, mine, x)
    for taker, row in enumerate(found):
        for giver, size in enumerate(row[: over.size]):
            given = found[giver][over.size + taker]
            if size != given:
                rows = f"the rows that rank {taker} takes from rank {giver}"
                fail(over.function, rows, f"the {given} that it gives it", size)


def _unreadable(over: RankGroup, device: torch.device) -> bool:
    """Return whether no number can be read: in a simulation, and while a CUDA graph is captured.

    The runs before a capture were compared.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return captured or simulated(over, device.type)


def _compare(over: RankGroup, name: str, words: failures.Words, device: torch.device, x: Tensor | None = None) -> None:
    """Gather one number from each rank, of one size whatever is compared; where they differ, raise what each rank says."""
    digest = blake2b(repr((over.function, words)).encode(), digest_size=8).digest()
    number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    if len({said for (said,) in _everywhere(over, name, number, x)}) > 1:
        found: list[Any] = [None] * over.size
        mine = {
            "the function": over.function,
            **dict(failures.remembered(over)),
            "the collective": name,
            **dict(words),
        }
        run_collective(over, name, lambda: dist.all_gather_object(found, mine, group=over.group))
        check_alike(over.function, found)


def _everywhere(over: RankGroup, name: str, numbers: Tensor, x: Tensor | None) -> list[list[int]]:
    """Return the numbers of every rank, on their way to the collective `name` of x."""
    found = numbers.new_empty(over.size * numbers.numel())
    run_collective(over, name, lambda: gather_equal(found, numbers, group=over.group), x)
    return found.view(over.size, -1).tolist()


def check_everywhere(function: str, mesh: Any, check: Callable[[], T], said: Callable[[], Mapping[str, Any]]) -> T:
    """Return the result of `check`, once it has returned on every rank of a mesh and `said` is equal on all.

    One exchange along each axis of a DeviceMesh. A rank that is refused tells the others before it raises, so that they do
    not go on to wait for it.

    Args:
        said: what must be equal on all ranks, by its name in messages; called once `check` has returned.
    Raises:
        What `check` raises, where it does. SpecError on the other ranks, and on all where they say something else.
    """
    try:
        found = check()
    except Exception as error:
        with suppress(RuntimeError):  # no rank is left to tell
            _notes(function, mesh, {"refused": str(error).partition("\n")[0] or type(error).__name__})
        raise
    notes = _notes(function, mesh, {"said": {name: str(value) for name, value in said().items()}})
    for note in notes:
        if "refused" in note:
            fail_with(function, f"rank {note['rank']} of the mesh refuses the call", advice=f"There: {note['refused']}")
    check_alike(function, [note["said"] for note in notes])
    return found


def _notes(function: str, mesh: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the notes of every rank of a mesh, in rank order; this one's alone where there is no mesh, or a simulated one."""
    if not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None:
        return [mine]
    notes = [mine | {"rank": dist.get_rank()}]
    for dim in range(mesh.ndim):
        over = rank_group(function, mesh.get_group(dim))
        if over.several and not simulated(over, mesh.device_type):
            found: list[Any] = [None] * over.size
            run_collective(over, "all-gather", partial(dist.all_gather_object, found, notes, group=over.group))
            notes = [note for part in found for note in part]
    return sorted(notes, key=lambda note: note["rank"])

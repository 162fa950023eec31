"""What the ranks of a group have to say alike of a call, compared before the first such call sends anything else.

A rank that cut its tokens in another way, or wants a gradient that the others do not, would send messages that nobody
waits for: a hang or mixed shards. Every rank therefore sends one number, made from all that has to be alike, whenever it
meets a combination for the first time in a group; a training loop does so in its first step. Ranks that meet one that
others have met before and now leave are not found out here: those others no longer compare. Where ranks then wait for each
other, the errors say in what their calls differ (`failed_calls`).
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shared_specs.errors import fail
from shared_specs.sequence_checks import check_alike
from tiled_torch.parallel import failed_calls, transport
from tiled_torch.parallel.groups import RankGroup, not_compiled, rank_group

T = TypeVar("T")
_met: "weakref.WeakKeyDictionary[Any, set[Hashable]]" = weakref.WeakKeyDictionary()


@contextmanager
def first_time(over: RankGroup, what: Hashable) -> Iterator[bool]:
    """Whether a group of several ranks has not been here with `what` before, which is remembered unless it raises here."""
    met = _met.setdefault(over.group or dist.group.WORLD, set()) if over.several else {what}
    new = what not in met
    yield new
    if new:
        met.add(what)


@not_compiled
def agree(over: RankGroup, device: torch.device, said: Mapping[str, Any]) -> None:
    """Compares what this rank says of its call with what the others say; nothing is sent the second time.

    Args:
        device: of the call's tensors, which the group's backend moves.
        said: what has to be alike, by its name in messages: values whose repr tells them apart.
    Raises:
        SpecError: on every rank, with what each of them says of the first thing in which they differ.
    """
    words = tuple((name, repr(value)) for name, value in said.items())
    if over.several:
        failed_calls.remember(over, words)
    with first_time(over, (over.function, words)) as new:
        if not new:
            return
        digest = blake2b(repr((over.function, words)).encode(), digest_size=8).digest()
        number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
        if len(set(transport.all_gather(over, number, 0).wait().tolist())) > 1:
            found: list[Any] = [None] * over.size
            mine = {"the function": over.function, **dict(words)}
            transport.named(over, "all-gather", lambda: dist.all_gather_object(found, mine, group=over.group))
            check_alike(over.function, found)


def check_everywhere(function: str, mesh: Any, check: Callable[[], T], said: Callable[[], Mapping[str, Any]]) -> T:
    """What `check` returns, once it has returned on every rank of a mesh and all of them say the same.

    One exchange along each axis of a DeviceMesh. A rank that is refused tells the others before it raises, so that they do
    not go on to wait for it.

    Args:
        said: what has to be alike, by its name in messages; called once `check` has returned.
    Raises:
        What `check` raises, where it does. SpecError on the other ranks, and on all where they say something else.
    """
    try:
        found = check()
    except Exception as error:
        with suppress(RuntimeError):  # nobody there to be told
            _notes(function, mesh, {"refused": str(error).partition("\n")[0] or type(error).__name__})
        raise
    notes = _notes(function, mesh, {"said": {name: str(value) for name, value in said().items()}})
    for note in notes:
        if "refused" in note:
            got = f"a refusal on rank {note['rank']}"
            fail(function, "the call", "possible on every rank of the mesh", got, advice=f"There: {note['refused']}")
    check_alike(function, [note["said"] for note in notes])
    return found


def _notes(function: str, mesh: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank of a mesh has to say, in the order of the ranks; this one's alone where there is no mesh."""
    if not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None:
        return [mine]
    notes = [mine | {"rank": dist.get_rank()}]
    for dim in range(mesh.ndim):
        over = rank_group(function, mesh.get_group(dim))
        if over.several:
            found: list[Any] = [None] * over.size
            transport.named(over, "all-gather", partial(dist.all_gather_object, found, notes, group=over.group))
            notes = [note for part in found for note in part]
    return sorted(notes, key=lambda note: note["rank"])

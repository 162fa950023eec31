"""Which rank is missing where a collective fails: the ranks whose call failed tell each other in which one it was.

They do so in one log in the default process group's store. Until a call fails nothing is written there or read; then the
rank looks for LOOK_SECONDS, or until all others of its group have spoken, at what they wrote. Ranks that time out one after
the other know more the later they do. A rank whose program ends by an error that nobody caught writes that error, whatever
raised it, on its way out. Where the store does not answer, only the rank's own error is told.
"""

import atexit
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tiled_torch.collectives.groups import RankGroup

T = TypeVar("T")
LOOK_SECONDS = 2.0
_KEY = "tiled_torch/failed_calls"
Words = tuple[tuple[str, str], ...]
_Note = Mapping[str, Any]

_agreed: "weakref.WeakKeyDictionary[Any, tuple[str, Words]]" = weakref.WeakKeyDictionary()
_state = {"noted": False}  # whether this rank's last line in the log says where it waited


def remember(over: RankGroup, words: Words) -> None:
    """Note this rank's last call of a function in a group, by name, for the error of one that fails."""
    _agreed[over.group or dist.group.WORLD] = (over.function, words)


def run_collective(over: RankGroup, name: str, call: Callable[[], Any], x: Tensor | None = None) -> Any:
    """Return the call, a collective of x; where it fails or times out, its error says which rank waited in which collective of
    which function, and where the other ranks are."""
    withdraw()
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        members = ""
        if over.group is not None:
            members = f" (ranks {', '.join(map(str, dist.get_process_group_ranks(over.group)))} of all)"
        found = others_in(over, name, x)
        kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
        raise kind(
            f"{over.function}: {name} failed on rank {over.rank} of {over.size}. Every rank of the group{members} has to "
            f"make this call with fitting shapes; one that raised an error of its own, ended or is late does not. "
            f"{found + ' ' if found else ''}{error}"
        ) from error


def remembered(over: RankGroup) -> Words:
    """Return this rank's last note of the function that it is in."""
    function, words = _agreed.get(over.group or dist.group.WORLD, ("", ()))
    return words if function == over.function else ()


def withdraw() -> None:
    """Delete what this rank wrote of a failed call: it is in a call again."""
    if _state["noted"]:
        _state["noted"] = False
        _bounded(lambda: _write({}))


def others_in(over: RankGroup, name: str, x: Tensor | None) -> str:
    """Write that the collective `name` of x failed here; return, in sentences, where the other ranks of the group are.

    "" where that cannot be told. Never raises; returns within LOOK_SECONDS and a second.
    """
    return _bounded(lambda: _told(over, name, x)) or ""


def _told(over: RankGroup, name: str, x: Tensor | None) -> str:
    group: Any = over.group or dist.group.WORLD
    mine = {
        "group": str(group.group_name),
        "call": f"{over.function}: {name}",
        "x": "" if x is None else f"{x.dtype} {list(x.shape)}".removeprefix("torch."),
        "agreed": remembered(over),
    }
    _write(mine)
    _state["noted"] = True
    members = dist.get_process_group_ranks(group)
    return " ".join(_sentences(over.rank, members, mine, _look(members[: over.rank] + members[over.rank + 1 :])))


def _sentences(rank: int, members: Sequence[int], mine: _Note, found: Mapping[int, _Note]) -> list[str]:
    """Return sentences about the other ranks, first where to look. `found`: notes by rank of the world."""
    said: dict[str, list[int]] = {}
    for number, world_rank in enumerate(members):
        if number != rank:
            said.setdefault(_where(mine, found.get(world_rank, {})), []).append(number)
    order = sorted(said, key=lambda words: (words == _SAME, not words.startswith(_SILENT)))
    return [f"{_ranks(said[words], members)} {words}." for words in order]


_SAME = "waited in the same call"
_SILENT = "wrote nothing: look there first for an error, an end or work that goes on"


def _where(mine: _Note, other: _Note) -> str:
    """Return what is known of a rank, as the end of a sentence."""
    if "ended" in other:
        return f"ended with {other['ended']}"
    if "call" not in other:
        return _SILENT
    own = dict(mine["agreed"])
    differ = [f"{name} {value} (here {own[name]})" for name, value in other["agreed"] if own.get(name, value) != value]
    if (other["group"], other["call"]) == (mine["group"], mine["call"]):
        text = _SAME
        if other["x"] != mine["x"]:
            differ.insert(0, f"{other['x']} (here {mine['x']})")
    else:
        place = "" if other["group"] == mine["group"] else " of another group"
        text = f"waited in another call{place}, {other['call']} of {other['x'] or 'objects'}"
    return text + (", with " + ", ".join(differ) if differ else "")


def _ranks(numbers: Sequence[int], members: Sequence[int]) -> str:
    """`Ranks 0, 2 (1, 8 of all)`: by their numbers in the group, and in the world where these are others."""
    text = f"Rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    of_all = [members[number] for number in numbers]
    return text if of_all == list(numbers) else f"{text} ({', '.join(map(str, of_all))} of all)"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _write(note: _Note) -> None:
    _store().append(_KEY, json.dumps({"rank": dist.get_rank(), **note}) + "\n")


def _look(ranks: Sequence[int]) -> dict[int, _Note]:
    """Return the last word of each of these ranks of the world, once all have spoken or the time is over."""
    end, pause = time.monotonic() + LOOK_SECONDS, 0.02
    while True:
        lines = (json.loads(line) for line in _store().get(_KEY).decode().splitlines())
        found = {note["rank"]: note for note in lines}  # the last one of each
        spoken = {rank: found[rank] for rank in ranks if len(found.get(rank, ())) > 1}
        if len(spoken) == len(ranks) or time.monotonic() > end:
            return spoken
        time.sleep(pause)
        pause *= 2


def _bounded(call: Callable[[], T]) -> T | None:
    """Return the result of the call; None where it raises, or waits for a store that does not answer."""
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(call())

    with suppress(RuntimeError):  # there is no starting a thread once the interpreter ends
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS + 1)
    return found[0] if found else None


@atexit.register
def _ended() -> None:
    """The error by which this process ends, for ranks that will wait for it. An append waits for no answer."""
    error = getattr(sys, "last_value", None)  # set by Python where nobody caught an error
    if error is None or _state["noted"] or not dist.is_available() or not dist.is_initialized():
        return
    with suppress(Exception):
        text = str(error).partition("\n")[0]
        _write({"ended": f"{type(error).__name__}: {text}"[:400].rstrip(".")})

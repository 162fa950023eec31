"""What the ranks of a group have to say alike of a call, compared before the first such call sends anything else.

A rank that cut its tokens in another way, or wants a gradient that the others do not, would send messages that nobody
waits for: a hang or mixed shards. Every rank therefore sends one number, made from all that has to be alike, whenever it
meets a combination for the first time in a group; a training loop does so in its first step. Ranks that meet one that
others have met before and now leave are not found out here: those others no longer compare. Where ranks then wait for each
other, the errors say in what their calls differ (`failed_calls`).
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from shared_specs.sequence_checks import check_alike
from tiled_torch.parallel import failed_calls, transport
from tiled_torch.parallel.groups import RankGroup, not_compiled

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

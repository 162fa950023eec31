"""Which ranks a call runs over: a process group, a mesh of one dim or the default group, checked once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, fail_with

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one group as this rank sees them. `function` is the public call that errors name."""

    function: str
    group: Any  # None: the default group
    rank: int
    size: int

    @property
    def several(self) -> bool:
        return self.size > 1


def rank_group(function: str, group: Any = None) -> RankGroup:
    """Return this rank's place in `group`.

    Args:
        function: the public call, for error messages.
        group: a torch.distributed process group, a DeviceMesh of one dim, or None for the default group.
    Raises:
        SpecError: a mesh of several dims, or a group that this rank is not in.
        TypeError: anything else. UnsupportedError: no process group has been initialised.
    """
    group = process_group(function, group)
    return RankGroup(function, group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))


def process_group(function: str, group: Any) -> Any:
    """Return the process group that `group` stands for; None for the default one. Errors as `rank_group`."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        text = error_text(function, "group", "usable here", "no initialised process group")
        raise UnsupportedError(text + " Call torch.distributed.init_process_group first.")
    if isinstance(group, torch.distributed.device_mesh.DeviceMesh):
        if group.ndim != 1:
            fail(function, "group", "a mesh of one dim", f"one of {group.ndim}")
        if group.get_coordinate() is None:
            fail_with(function, "this rank is not in group", advice="Call it only on the ranks of the group.")
        return group.get_group()
    outside = group is torch.distributed.GroupMember.NON_GROUP_MEMBER  # what new_group gives the ranks it leaves out
    if group is not None and not outside and not isinstance(group, torch.distributed.ProcessGroup):
        fail_type(function, "group", "a process group, a DeviceMesh or None", type(group).__name__)
    if outside or (group is not None and torch.distributed.get_rank(group) < 0):  # type: ignore[arg-type]
        fail_with(function, "this rank is not in group", advice="Call it only on the ranks of the group.")
    return group


def backend_of(over: RankGroup, device: str) -> str:
    """Return the backend that moves tensors of a kind of device ("cuda", "cpu") in a group: "nccl", another backend's name,
    or "none".

    Asked of the device: a group that was made without naming a backend has one for each kind.
    """
    group: Any = over.group or torch.distributed.group.WORLD
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError:
        return "none"


def simulated(over: RankGroup, device: str) -> bool:
    """Return whether the other ranks are a simulation (a fake process group), in which nobody answers."""
    return backend_of(over, device) == "fake"


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which torch.compile leaves as it is: a break in the graph, with the same results and gradients."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            outside: Any = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call

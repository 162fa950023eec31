"""Which ranks a call without a tp_group means: a group that was set here, Megatron-core's where it is loaded, or all ranks."""

import sys
from typing import Any

import torch

from shared_specs.core import checks
from shared_specs.errors import fail
from tiled_torch.collectives.groups import process_group

_GROUPS: dict[str, Any] = {}  # "tensor", "expert"
_MEGATRON = "megatron.core.parallel_state"


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, *, expert_tensor_parallel_size: int | None = None
) -> None:
    """Make the tensor-parallel groups of consecutive ranks, by Megatron-core's name. Every rank of the default group calls it.

    Pipeline, context and data-parallel groups are none of this library's: make them with torch.distributed.

    Args:
        tensor_model_parallel_size: ranks of a group. expert_tensor_parallel_size: of the group of an expert's layers; None: as
            many.
    Raises:
        SpecError: the sizes do not divide the number of ranks. UnsupportedError: no process group.
    """
    name = "initialize_model_parallel"
    process_group(name, None)
    world = torch.distributed.get_world_size()
    expert = tensor_model_parallel_size if expert_tensor_parallel_size is None else expert_tensor_parallel_size
    for argument, size in (
        ("tensor_model_parallel_size", tensor_model_parallel_size),
        ("expert_tensor_parallel_size", expert),
    ):
        checks.check_count(name, argument, size)
        if size is None or world % size:
            fail(name, argument, f"a divisor of the {world} ranks", size)
    _GROUPS["tensor"] = _own_group(world, tensor_model_parallel_size)
    _GROUPS["expert"] = _own_group(world, expert)


def _own_group(world: int, size: int) -> Any:
    own, rank = None, torch.distributed.get_rank()
    for first in range(0, world, size):
        group = torch.distributed.new_group(list(range(first, first + size)))
        own = group if first <= rank < first + size else own
    return own


def set_tensor_model_parallel_group(group: Any, expert: Any = None) -> None:
    """Let calls without a tp_group mean this group: of a mesh, say. expert: that of an expert's layers; None: the same.

    Raises:
        SpecError, TypeError, UnsupportedError: a group that this rank is not in, or none.
    """
    for name, one in (("tensor", group), ("expert", group if expert is None else expert)):
        _GROUPS[name] = process_group("set_tensor_model_parallel_group", one)


def destroy_model_parallel() -> None:
    """Forget the groups that were set here."""
    _GROUPS.clear()


def model_parallel_is_initialized() -> bool:
    """Return whether groups have been set here."""
    return bool(_GROUPS)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    """Return the tensor-parallel group of this rank; None stands for all ranks. check_initialized: there must be one.

    Raises:
        SpecError: none has been set, and Megatron-core has none, with check_initialized.
    """
    return _known("tensor", check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """Return the tensor-parallel group of an expert's layers. As `get_tensor_model_parallel_group`."""
    return _known("expert", check_initialized)


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's place in its tensor-parallel group."""
    return torch.distributed.get_rank(group_or_default(None))


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks of the tensor-parallel group."""
    return torch.distributed.get_world_size(group_or_default(None))


def group_or_default(group: Any, *, expert: bool = False) -> Any:
    """Return the group that a call means, as `tiled_torch.parallel` takes it: None stands for all ranks."""
    return _known("expert" if expert else "tensor", False) if group is None else group


def number_of_megatron(function: str, default: int) -> int:
    """Return what a function of Megatron-core's own `parallel_state` says; default where that has no groups or no such name."""
    asked = getattr(_theirs(), function, None)
    return default if asked is None else asked()


def _theirs() -> Any:
    """Return Megatron-core's own `parallel_state` where it is loaded and has groups, else None."""
    theirs: Any = sys.modules.get(_MEGATRON)
    return theirs if theirs is not None and theirs.is_initialized() else None


def _known(kind: str, required: bool) -> Any:
    theirs = _theirs()
    if kind not in _GROUPS and theirs is not None:
        return (
            theirs.get_tensor_model_parallel_group() if kind == "tensor" else theirs.get_expert_tensor_parallel_group()
        )
    if required and kind not in _GROUPS:
        fail(f"get_{kind}_group", "the group", "set", None, advice="Call initialize_model_parallel first.")
    return _GROUPS.get(kind)

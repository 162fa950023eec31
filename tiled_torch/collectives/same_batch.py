"""Whether all ranks of an axis were given the same batch: compared in the first call, where wrong dealing shows already."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from shared_specs.errors import fail
from tiled_torch.collectives.failures import run_collective
from tiled_torch.collectives.groups import rank_group, simulated


def compare_first_batch(function: str, model: nn.Module, mesh: DeviceMesh, advice: str) -> list[int]:
    """Put the comparison in front of the model's forward, for its first call. Return the hook's number; none for one rank."""
    if mesh.size() == 1:
        return []

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = pytree.tree_leaves_with_path((args, kwargs))
        handle.remove()
        check_same_batch(function, {pytree.keystr(path): x for path, x in given if isinstance(x, Tensor)}, mesh, advice)

    handle: RemovableHandle = model.register_forward_pre_hook(compare, with_kwargs=True)
    return [handle.id]


def check_same_batch(function: str, given: Mapping[str, Tensor], mesh: DeviceMesh, advice: str) -> None:
    """Compare tensors over the ranks of a mesh axis; not with simulated ones.

    Raises:
        SpecError: on every rank, with the ranks whose tensors are not those of the first.
    """
    over = rank_group(function, mesh)
    if simulated(over, mesh.device_type):
        return
    mine = {name: [str(x.dtype), list(x.shape), _digest(x)] for name, x in given.items()}
    ranks: list[Any] = [None] * over.size
    run_collective(over, "all-gather", lambda: dist.all_gather_object(ranks, mine, group=over.group))
    others = [str(rank) for rank, found in enumerate(ranks) if found != ranks[0]]
    if others:
        got = f"another one on rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
        fail(function, "the batch", "the same on every rank of the axis", got, advice=advice)


def _digest(x: Tensor) -> str:
    """Return a digest of the numbers that a rank holds itself; tensors without numbers have the same one."""
    x = x.to_local() if isinstance(x, DTensor) else x
    if x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
        return ""
    return blake2b(x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()

"""What the ranks run for broadcast_data: batches received, and the error that each rank gets. See tests/ranks.py."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared_specs import SpecError
from tests.loss.ranks_torch_loss import group_of
from tests.mlp.ranks_torch_engines import Collectives
from tiled_torch.parallel import broadcast_data


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(100, (2, 5), generator=generator),
        "mask": torch.randn(5, 3, generator=generator).T > 0,  # not contiguous
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "scalar": torch.tensor(7.5),
        "half": torch.randn(3, generator=generator).bfloat16().requires_grad_(),
        "unused": torch.ones(2),
    }


KEYS = ["tokens", "mask", "empty", "scalar", "half"]


def received(rank: int, world: int, group: str = "default") -> dict[str, Any] | None:
    """Whether each tensor is that of rank 0 of the group, and what was sent."""
    everywhere = rank
    over, rank, _ = group_of(group, rank, world)
    if rank < 0:
        return None
    first = {"subset": 1, "mesh dim": everywhere - rank}.get(group, 0)
    keys = KEYS if rank == 0 else KEYS[::-1]
    with Collectives() as collectives:
        found = broadcast_data(keys, batch(first) if rank == 0 else None, group=over)
    expected = batch(first)
    return {
        "same": all(torch.equal(found[key], expected[key]) for key in KEYS),
        "kinds": all(
            (found[key].dtype, found[key].shape) == (expected[key].dtype, expected[key].shape) for key in KEYS
        ),
        "order": list(found) == keys,
        "gradients": any(one.requires_grad for one in found.values()),
        "broadcasts": collectives.counts["broadcast_"],
    }


def of_one_dtype(rank: int, world: int) -> list[Any]:
    """With a dtype, and tensors on the other ranks that say what they expect."""
    data = {"a": torch.arange(3) + rank, "b": torch.full((2, 2), rank)}
    found = broadcast_data(["a", "b"], data if rank < 2 else None, torch.int64)
    return [found["a"].tolist(), found["b"].tolist()]


def alone(rank: int, world: int) -> bool:
    """In a group of one nothing is sent and nothing copied."""
    groups = [dist.new_group([one]) for one in range(world)]
    x = torch.ones(3)
    with Collectives() as collectives:
        found = broadcast_data(["x"], {"x": x}, group=groups[rank])
    return not collectives.counts and found["x"].data_ptr() == x.data_ptr()


def refused(rank: int, world: int, kinds: list[str], group: str = "default") -> dict[str, str] | None:
    """Of every kind of call that is wrong on one rank: the error on this rank."""
    over, rank, world = group_of(group, rank, world)
    return None if rank < 0 else {what: _refusal(over, rank, world, what) for what in kinds}


def _refusal(group: Any, rank: int, world: int, what: str) -> str:
    keys: Any = ["a", "b"]
    data: Any = {"a": torch.ones(2, 3), "b": torch.ones(4)} if rank == 0 else None
    dtype: Any = torch.float32
    device = None
    last = rank == world - 1
    match what:
        case "missing" if rank == 0:
            del data["b"]
        case "dtype" if rank == 0:
            data["b"] = data["b"].double()
        case "keys" if last:
            keys = ["a"]
        case "other keys" if last:
            keys = ["a", "c"]
        case "dtypes" if last:
            dtype = torch.float64
        case "shape" if last:
            data = {"a": torch.ones(3, 2)}
        case "expected dtype" if last:
            data = {"a": torch.ones(2, 3, dtype=torch.float64)}
        case "no data" if rank == 0:
            data = None
        case "kind of data" if last:
            data = [torch.ones(2)]
        case "kind of keys" if last:
            keys = "ab"
        case "twice" if last:
            keys = ["a", "a"]
        case "kind of tensor" if rank == 0:
            data["a"] = [1.0, 2.0]
        case "none" if rank == 0:
            data["a"] = None
        case "kind of dtype" if last:
            dtype = "float32"
        case "device" if last:
            device = "gpu"
    try:
        broadcast_data(keys, data, dtype, device=device, group=group)
    except SpecError as error:
        return str(error)
    return "accepted"


def late(rank: int, world: int, seconds: float) -> str:
    """Rank 0 makes no call; the others wait for `seconds` and are told so."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    message = "no call"
    if rank:
        try:
            broadcast_data(["a"], None, group=group)
            message = "returned"
        except RuntimeError as error:
            message = str(error)
    dist.barrier()  # nobody leaves before all have been told
    return message

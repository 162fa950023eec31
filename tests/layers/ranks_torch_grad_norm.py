"""What the ranks run for the norm of gradients over layers that are split by hand. See tests/ranks.py."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.layers.ranks_torch_layer_engines import SEED, Model, batch, mesh_of, part, sharded, whole_model
from tests.loss.ranks_torch_loss import distance, group_of
from tiled_torch import parallel
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import rank_group

ORDERS = (2.0, 1.0, math.inf)


def whole_gradients(scale: float = 1.0) -> Model:
    """Of one process, for the batch that every rank computes a part of."""
    whole = whole_model(SEED)
    ids, dy = batch(0, 0)
    (whole(ids) * dy * scale).sum().backward()
    return whole


def backward(model: nn.Module, rank: int, world: int, sequence_parallel: bool) -> None:
    ids, dy = batch(0, 0)
    y = model(ids)
    (y * (dy.chunk(world)[rank] if sequence_parallel else dy)).sum().backward()


def norms(rank: int, world: int, sequence_parallel: bool, main_grad: str | None) -> dict[str, Any]:
    """Errors of the norms and of clipped gradients; what a norm of the rank's own gradients would have been off by."""
    torch.manual_seed(SEED)
    model, whole = Model(sequence_parallel=sequence_parallel), whole_gradients()
    for parameter in model.norm.parameters():
        parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    backward(model, rank, world, sequence_parallel)
    summed = parallel.reduce_sequence_parallel_grads(model)
    if main_grad is not None:
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad = parameter.grad.to(getattr(torch, main_grad)), None  # type: ignore[attr-defined, union-attr]
    exact = [torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()], order) for order in ORDERS]  # type: ignore[misc]
    found = [parallel.get_grad_norm(model, order) for order in ORDERS]
    listed = parallel.get_grad_norm(list(model.parameters()) + list(model.parameters()))
    own = torch.stack([getattr(p, "main_grad", p.grad).double().norm() for p in model.parameters()]).norm()
    limit = float(exact[0]) / 3
    returned = parallel.clip_grad_norm_(model.parameters(), limit)
    torch.nn.utils.clip_grad_norm_(whole.parameters(), limit)
    clipped = []
    for (name, parameter), one in zip(model.named_parameters(), whole.parameters(), strict=True):
        mine = parameter.grad if main_grad is None else parameter.main_grad  # type: ignore[attr-defined]
        clipped.append(distance(mine.double(), part(one.grad, name, Axis(rank, world))))  # type: ignore[arg-type]
    return {
        "norms": [abs(float(a) - float(b)) / float(b) for a, b in zip(found, exact, strict=True)],
        "listed": abs(float(listed) - float(exact[0])) / float(exact[0]),
        "own": abs(float(own) - float(exact[0])) / float(exact[0]),
        "clipped": max(clipped),
        "returned": torch.equal(returned, found[0]),
        "value": float(found[0]),
        "dtype": str(found[0].dtype),
        "summed": summed,
        "after": abs(float(parallel.get_grad_norm(model)) / limit - 1),
    }


class Axis:
    """The tensor-parallel axis of a mesh, as `part` asks for it."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __getitem__(self, _: str) -> "Axis":
        return self

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.world


def fully_sharded(rank: int, world: int) -> dict[str, float]:
    """Errors of the norm, and of clipped gradients, where fully_shard has cut the parts once more and dropped their marks."""
    mesh = mesh_of(world)
    model, whole = sharded(mesh, sequence_parallel=True), whole_gradients()
    for parameter in model.norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    tensor = mesh["tp"].get_local_rank()
    backward(model, tensor, world // 2, True)  # the same batch on both data ranks
    parallel.reduce_sequence_parallel_grads(model, group=mesh["tp"])
    exact = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])  # type: ignore[misc]
    found = parallel.clip_grad_norm_(model, float(exact) / 3, group=mesh["tp"])
    torch.nn.utils.clip_grad_norm_(whole.parameters(), float(exact) / 3)
    errors = {"norm": abs(float(found / exact) - 1)}
    for (name, parameter), one in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        errors[name] = distance(parameter.grad.full_tensor(), part(one.grad, name, mesh))  # type: ignore[arg-type]
    return errors


def experts(rank: int, world: int) -> list[Any]:
    """Norms beside those by hand: an expert split over both ranks; one expert on each; refusals."""
    group, _, _ = group_of("mesh", rank, world)
    single = [torch.distributed.new_group([one]) for one in range(world)][rank]

    def made(values: list[float], **marks: Any) -> Tensor:
        one = nn.Parameter(torch.zeros(len(values)))
        one.grad = torch.tensor(values)
        for name, value in marks.items():
            setattr(one, name, value)
        return one

    dense = made([3.0])
    split = made([1.0 + rank, 2.0], tensor_model_parallel=True, allreduce=False)
    copied = made([5.0], allreduce=False)
    over_both = parallel.get_grad_norm([dense, split, copied], expert_group=group)
    dealt = parallel.get_grad_norm([dense, split, copied], expert_group=single, expert_parallel_group=group)
    frozen = nn.Parameter(torch.zeros(2))
    nothing = parallel.get_grad_norm([frozen])
    uneven = parallel.get_grad_norm([split] if rank == 0 else [frozen], expert_group=group)
    both = made([1.0], main_grad=torch.ones(1))
    bad = {
        "experts": lambda: parallel.get_grad_norm([split]),
        "both": lambda: parallel.get_grad_norm([both]),
        "order": lambda: parallel.get_grad_norm([dense], 0),
        "max_norm": lambda: parallel.clip_grad_norm_([dense], -1.0),
        "kind": lambda: parallel.get_grad_norm(3),  # type: ignore[arg-type]
        "list": lambda: parallel.get_grad_norm([3]),  # type: ignore[list-item]
    }
    messages = {}
    for name, call in bad.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    squares = [float(one.double().square()) for one in (over_both, dealt, nothing, uneven)]
    total = transport.all_reduce(rank_group("test", group), split.grad.square().sum()).wait()  # type: ignore[union-attr]
    return [squares, [9 + float(total) + 25, 9 + float(total) + 50, 0.0, 5.0], messages]

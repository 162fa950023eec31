"""What every process of test_layers.py runs on its GPU: collectives, layers, an embedding and a batch over NCCL."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared_specs.collectives.cases import collective_cases
from tests.collectives.ranks_torch_collectives import call
from tests.loss.ranks_torch_loss import distance, draw
from tiled_torch import parallel


def collectives(rank: int, world: int, device: torch.device) -> float:
    """Every case of the specification, with its gradient."""
    errors = []
    for case in collective_cases(world):
        inputs, gradients = case.inputs(), case.output_gradients()
        x = torch.from_numpy(inputs[rank]).to(device).requires_grad_()
        y = call(case, rank, None)(x)
        (dx,) = torch.autograd.grad(y, x, torch.from_numpy(gradients[rank]).to(device))
        expected = case.outputs(inputs)[rank], case.input_gradients(gradients)[rank]
        pairs = zip((y.detach(), dx), expected, strict=True)
        errors += [distance(found.cpu(), torch.from_numpy(exact)) for found, exact in pairs]
    return max(errors)


def layers(rank: int, world: int, device: torch.device) -> float:
    """Embedding, column and row with sequence parallelism, of uneven parts, against plain layers."""
    sizes = [3 + other for other in range(world)]
    ids, dy = torch.arange(sum(sizes)) % 9, draw(sum(sizes), 8, seed=1)
    torch.manual_seed(0)
    like: dict[str, Any] = {"dtype": torch.float64}
    plain = nn.Sequential(nn.Embedding(9, 8, **like), nn.Linear(8, 16, **like), nn.GELU(), nn.Linear(16, 8, **like))
    expected = plain(ids)
    expected.backward(dy)
    torch.manual_seed(0)
    embedding = parallel.VocabParallelEmbedding(9, 8, reduce_scatter_embeddings=True, **like).to(device)
    up = parallel.ColumnParallelLinear(8, 16, sequence_parallel=True, **like).to(device)
    down = parallel.RowParallelLinear(16, 8, sequence_parallel=True, input_is_parallel=True, **like).to(device)
    y = down(F.gelu(up(embedding(ids.to(device), split_sizes=sizes), split_sizes=sizes)), split_sizes=sizes)
    y.backward(dy.split(sizes)[rank].to(device))
    exact: list[Any] = [plain[1].weight.grad, plain[1].bias.grad, plain[3].weight.grad, plain[3].bias.grad]
    exact = [exact[0].chunk(world)[rank], exact[1].chunk(world)[rank], exact[2].chunk(world, 1)[rank], exact[3]]
    found: list[Any] = [up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad]  # type: ignore[union-attr]
    entries = embedding.weight.shape[0]
    rows = plain[0].weight.grad[rank * entries : (rank + 1) * entries]  # type: ignore[index]
    pairs = [(y.detach(), expected.detach().split(sizes)[rank]), (embedding.weight.grad[: len(rows)], rows)]  # type: ignore[index]
    return max(distance(a.cpu(), b) for a, b in [*pairs, *zip(found, exact, strict=True)])


def lookups(rank: int, world: int, device: torch.device) -> dict[str, bool]:
    """A deterministic gradient of many equal ids, and what an id outside of the vocabulary gives."""
    ids = torch.arange(1 << 14, device=device) % 3
    dy = draw(len(ids), 64, seed=2).float().to(device)
    gradients = []
    for _ in range(3):
        weight = nn.Parameter(torch.ones(4, 64, device=device))
        y = parallel.vocab_parallel_embedding(ids, weight, deterministic=True)
        y.backward(dy)
        gradients.append(weight.grad)
    found = {"deterministic": all(torch.equal(one, gradients[0]) for one in gradients)}  # type: ignore[arg-type]
    if device.type == "cuda":  # on a CPU it is refused
        outside = parallel.vocab_parallel_embedding(torch.tensor([0, 4 * world], device=device), weight)
        found["nan"] = bool(outside[0].isfinite().all() and outside[1].isnan().all())
    return found


def batches(rank: int, world: int, device: torch.device) -> dict[str, bool]:
    """Tensors on the host of rank 0, which arrive on every GPU."""
    data = {"ids": torch.arange(6).view(2, 3), "mask": torch.tensor([True, False]), "half": torch.ones(3).bfloat16()}
    found = parallel.broadcast_data(list(data), data if rank == 0 else None)
    return {
        "same": all(torch.equal(found[name].cpu(), one) for name, one in data.items()),
        "device": {one.device for one in found.values()} == {device},
    }


def answers(rank: int, world: int, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Every check; an error is its text, after which the group is not used again."""
    for check in (collectives, layers, lookups, batches):
        try:
            yield check.__name__, check(rank, world, device)
        except Exception as error:
            yield check.__name__, repr(error)
            return

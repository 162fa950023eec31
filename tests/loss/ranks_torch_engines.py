"""What the ranks run for losses inside DDP and fully_shard: two micro-batches with a global count. See tests/ranks.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared_specs import LossOptions
from tests.loss.ranks_torch_loss import HIDDEN, draw, labels
from tests.mlp.ranks_torch_engines import full, spread
from tests.plans.ranks_torch_model import error_between
from tiled_torch import TiledLinearCrossEntropy, tiled_loss


class LanguageModel(nn.Module):
    """A layer and a head; the head returns a loss, or a sum and a count through `tiled_loss`."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.layer, self.kind, self.num_shards = nn.Linear(HIDDEN, HIDDEN), kind, 2 + 3 * rank
        outputs = ("log_probs",) if kind == "outputs" else ()
        self.head: Any = SumHead() if kind == "tiled_loss" else TiledLinearCrossEntropy(
            HIDDEN, 11, bias=True, num_shards=self.num_shards, loss=LossOptions(outputs=outputs)
        )  # fmt: skip
        self.double()
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(draw(*parameter.shape, seed=20 + number))

    def forward(self, x: Tensor, targets: Tensor, num_valid: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.kind == "tiled_loss":
            return tiled_loss(self.head, h, targets, num_shards=self.num_shards) / num_valid
        result = self.head(h, targets, num_valid=num_valid)
        return result if self.kind == "loss" else result.loss - result.log_probs.sum() / num_valid


class SumHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(11, HIDDEN)), nn.Parameter(torch.empty(11))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, self.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def batch(rank: int, micro: int, case: str) -> tuple[Tensor, Tensor]:
    """Other lengths and other numbers of ignored labels on every rank and in every micro-batch."""
    length = {"plain": 6 + 5 * rank + micro, "one token": 1 if rank else 9, "no tokens": 0 if rank else 9}.get(case, 7)
    x, targets = draw(2, length, HIDDEN, seed=50 + 10 * rank + micro), labels(11, 2, length)
    targets[:, : rank + micro] = -100
    if case == "all ignored" and rank:
        targets.fill_(-100)
    return x, targets


def engine(rank: int, world: int, wrapped: str, kind: str, case: str = "plain") -> dict[str, Any]:
    """DDP or fully_shard over two micro-batches with a global count, against one untiled process."""
    micros = range(2)
    batches = {(r, m): batch(r, m, case) for r in range(world) for m in micros}
    count = torch.stack([(targets != -100).sum() for _, targets in batches.values()]).sum()
    truth = LanguageModel("tiled_loss", 0)
    for x, targets in batches.values():
        logits = F.linear(torch.tanh(truth.layer(x)), truth.head.weight, truth.head.bias).flatten(0, 1)
        value = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
        (2 * value if kind == "outputs" else value).backward()
    expected = {i: p.grad for i, p in enumerate(truth.parameters())}

    model: Any = LanguageModel(kind, rank)
    fired: list[int] = []
    if wrapped == "ddp":
        engine = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        if wrapped == "fsdp2 head":
            fully_shard(model.head, mesh=mesh)
        engine = fully_shard(model, mesh=mesh)
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: fired.append(i))
    for micro in micros:
        engine(*batches[rank, micro], num_valid=count / world).backward()
    found = {i: full(p.grad) for i, p in enumerate(model.parameters())}
    return {
        "error": error_between(found, expected),  # type: ignore[arg-type]
        "fired": sorted(fired) == sorted([*range(len(found))] * 2),
        "spread": spread([g for g in found.values() if g is not None]),
    }

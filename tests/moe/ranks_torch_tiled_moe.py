"""What the ranks run of `TiledMoE`: an engine that shards or averages gradients, with its own tokens on each rank."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shared_specs.core.rounding import relative_error
from tiled_torch import TiledMoE


class Block(nn.Module):
    """A residual around a mixture of experts, checkpointed; its logits have a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = TiledMoE(8, 12, 4, 2, num_shards=3, return_router_logits=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            y, logits = self.moe(x)
            return x + y, logits.logsumexp(-1).square().mean()

        return checkpoint(run, x, use_reentrant=False)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for block in model.children():
        x, of_logits = block(x)
        total = total + of_logits
    return total + x.square().mean()


class Whole(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self, x)


def trained(engine: str, rank: int, world: int) -> dict[str, Any]:
    """The worst error of the gradients of two blocks against those of one process that has all tokens."""
    torch.manual_seed(0)
    model = Whole(Block(), Block())
    batches = torch.randn(world, 2, 5 * 8, dtype=torch.float64).view(world, 10, 8)
    single = copy.deepcopy(model)
    for x in batches:
        (single(x) / world).backward()
    wrapped: nn.Module = model
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    wrapped(batches[rank]).backward()
    errors = []
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        found = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        errors.append(relative_error(found.numpy(), theirs.grad.numpy()))
    dist.barrier()
    return {"error": max(errors)}

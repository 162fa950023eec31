"""What the ranks run of `check`: an engine with its part of the batch on each rank, against one process with all of it."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.check.torch_models import tiny, tokens
from tiled_torch import check, tile_model


def checked(engine: str, fault: str, rank: int, world: int) -> dict[str, Any]:
    """What `check` says of an engine. fault: "" or what is wrong with it."""

    def tile(model: Any) -> Any:
        tile_model(model, num_shards=3)
        if engine == "ddp":
            return DistributedDataParallel(model)
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        part = 0 if fault == "one part for all" else rank
        loss = model(**{name: value.chunk(world)[part] for name, value in batch.items()})
        (loss / world if fault == "divided twice" else loss).backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world

    report = check(tiny(), tokens(4), tile=tile, step=step, plain_step=lambda model, batch: model(**batch))
    first = report.first
    gradients = sum(result.kind == "gradient" for result in report.results)
    return {
        "first": first and [first.kind, first.name],
        "paths": sorted(set(report.paths.values())),
        "gradients": gradients,
    }

"""What the ranks run when mixed precision of the halves is compared: a sharded Llama, and plain ones. See tests/ranks.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import DataParallel, ParallelConfig
from tests.on_torch.ranks_plans import full
from tests.tiny_model import tiny_config, tiny_weights
from tiled_torch.commands.finetune import build_model
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize


def models(rank: int, world: int, tokens: list[list[int]], data: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of the whole batch: sharded and tiled, and of one process, untiled, in float64 and bfloat16."""
    ids = torch.tensor(tokens)
    found = {
        name: _of(_model().to(dtype), ids) for name, dtype in (("oracle", torch.float64), ("plain", torch.bfloat16))
    }
    model = _model()
    tile_model(model, num_shards=3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    split = parallelize(model, mesh, ParallelConfig(data=DataParallel(**data)))
    found["sharded"] = _of(split, ids.chunk(world)[rank])
    mean = torch.tensor(found["sharded"]["loss"])
    dist.all_reduce(mean)
    found["sharded"]["loss"] = mean.item() / world
    return found if rank == 0 else {}


def _model() -> Any:
    """Weights in float32."""
    return build_model(tiny_config(), tiny_weights(tiny_config()), torch.device("cpu")).float()


def _of(model: Any, ids: Tensor) -> dict[str, Any]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: full(parameter.grad).double().tolist() for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients}

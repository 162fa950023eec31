"""What the ranks run when mixed precision of the halves is compared: a sharded Llama, and plain ones. See tests/ranks.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import ParallelConfig
from tests.plans.ranks_torch_parity_plans import STEPS
from tests.plans.ranks_torch_plans import full
from tests.tiny_model import tiny_config, tiny_weights
from tiled_torch.commands.finetune.trainer import build_model
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize


def models(
    rank: int, world: int, tokens: list[list[int]], cases: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Loss and gradients of the whole batch: of one process, untiled, in float64 and bfloat16, and sharded and tiled.

    `cases`: name -> axes of a mesh, and the fields of a ParallelConfig that are not None.
    """
    ids = torch.tensor(tokens)
    found = {
        name: _of(_model().to(dtype), ids) for name, dtype in (("oracle", torch.float64), ("plain", torch.bfloat16))
    }
    for name, case in cases.items():
        found[name] = _sharded(world, ids, *case)
    return found if rank == 0 else {}


def _sharded(world: int, ids: Tensor, axes: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    model = _model()
    tile_model(model, num_shards=3)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    split = parallelize(model, mesh, ParallelConfig(**{step: STEPS[step](**fields) for step, fields in config.items()}))
    found = _of(split, ids.chunk(axes["dp_shard"])[mesh["dp_shard"].get_local_rank()])
    mean = torch.tensor(found["loss"])
    dist.all_reduce(mean)
    return found | {"loss": mean.item() / world}


def _model() -> Any:
    """Weights in float32."""
    return build_model(tiny_config(), tiny_weights(tiny_config()), torch.device("cpu")).float()


def _of(model: Any, ids: Tensor) -> dict[str, Any]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: full(parameter.grad).double().tolist() for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients}

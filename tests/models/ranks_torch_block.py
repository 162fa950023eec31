"""What two ranks run of `tile_model(scope="block")`: engines around every layer. See tests/ranks.py."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig
from tests.models.torch_decoders import batch, decoder
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch import tile_model, tiling_paths
from tiled_torch.parallel import parallelize


def sharded(rank: int, world: int, engine: str, checkpointing: bool) -> dict[str, Any]:
    """Two micro-batches, gradients of the mean over ranks, against one process; and what each layer ran.

    engine: "layers", fully_shard by hand around each; "fsdp" and "ddp" are those of `parallelize`, with offloaded inputs where
    `checkpointing`.
    """
    torch.manual_seed(0)
    plain: Any = decoder()
    ids, _ = batch()
    with torch.no_grad():
        state = {name: p.clone() for name, p in plain.state_dict().items()}
    loss_of(plain, ids).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model: Any = decoder()
    model.load_state_dict(state)
    if checkpointing and engine == "layers":
        model.activation_checkpointing_enable({"use_reentrant": False})
    tile_model(model, scope="block", num_shards=2 + rank)
    if engine == "layers":
        layers: list[nn.Module] = list(model.model.layers)
        for unit in (*layers, model):
            fully_shard(unit)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        data = DataParallel(engine="ddp" if engine == "ddp" else "fsdp", reduce_dtype=None)
        recomputed = Checkpointing(offload=True) if checkpointing else None
        model = parallelize(model, mesh, ParallelConfig(data=data, checkpointing=recomputed))
    own = ids.chunk(world)[rank]
    for part in own.chunk(2):
        loss_of(model, part, scale=len(part) * world / len(ids)).backward()
    found = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    model = getattr(model, "module", model)
    paths = {path for name, path in tiling_paths(model).items() if name.rsplit(".", 1)[-1].isdigit()}
    return {"error": error_between(found, expected), "paths": sorted(paths)}


def loss_of(model: Any, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A mean over rows of a function of the logits, in the model's own dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss past the tiled one, which this is
        logits = model(input_ids=ids, use_cache=False).logits
    return scale * (logits * logits.cos()).mean()

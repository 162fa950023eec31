"""What two ranks run of `tile_model(scope="block")`: FSDP2 around every layer. See tests/ranks.py."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.models.torch_decoders import batch, decoder
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch import tile_model, tiling_paths


def sharded(rank: int, world: int, checkpointing: bool) -> dict[str, Any]:
    """Two micro-batches, gradients of the mean over ranks, against one process; and what each layer ran."""
    torch.manual_seed(0)
    plain: Any = decoder()
    ids, _ = batch()
    with torch.no_grad():
        state = {name: p.clone() for name, p in plain.state_dict().items()}
    loss_of(plain, ids).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model: Any = decoder()
    model.load_state_dict(state)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tile_model(model, scope="block", num_shards=2 + rank)
    layers: list[nn.Module] = list(model.model.layers)
    for unit in (*layers, model):
        fully_shard(unit)
    own = ids.chunk(world)[rank]
    for part in own.chunk(2):
        loss_of(model, part, scale=len(part) * world / len(ids)).backward()
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    paths = {path for name, path in tiling_paths(model).items() if name.rsplit(".", 1)[-1].isdigit()}
    return {"error": error_between(found, expected), "paths": sorted(paths)}


def loss_of(model: Any, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A mean over rows of a function of the logits, in the model's own dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss past the tiled one, which this is
        logits = model(input_ids=ids, use_cache=False).logits
    return scale * (logits * logits.cos()).mean()

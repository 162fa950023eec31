"""What two ranks run of models with tiled experts: engines around layers, experts and routers. See tests/ranks.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GptOssConfig, GptOssForCausalLM

from tests.models.torch_decoders import exact
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.causal_lm import TiledCausalLM


def model_of() -> Any:
    """A model whose routers compute in float64 too."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 37,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    }
    model = GptOssForCausalLM._from_config(GptOssConfig(**sizes), experts_implementation="eager").double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return exact(model).train()


def loss_of(model: Any, ids: Any, scale: float = 1.0) -> Any:
    if isinstance(getattr(model, "module", model), TiledCausalLM):
        return scale * model(input_ids=ids, labels=ids, use_cache=False).loss
    logits = model(input_ids=ids, use_cache=False).logits  # transformers computes its loss in float32
    return scale * F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def sharded(rank: int, world: int, engine: str, checkpointing: bool) -> dict[str, Any]:
    """Two micro-batches, gradients of the mean over ranks, against one untiled process. Ranks have other numbers of shards."""
    ids = torch.arange(4 * 10).reshape(4, 10) * 7 % 37
    plain = model_of()
    loss_of(plain, ids).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model: Any = model_of()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tile_model(model, num_shards=2 + rank)
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            for unit in (layer.mlp.experts, layer.mlp.router) if engine == "experts" else ():
                fully_shard(unit)
            fully_shard(layer)
        fully_shard(model)
    own = ids.chunk(world)[rank]
    for part in own.chunk(2):
        loss_of(model, part, scale=len(part) * world / len(ids)).backward()
    found = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    return {
        "error": error_between(found, expected),
        "paths": sorted(set(tiling_paths(getattr(model, "module", model)).values())),
    }

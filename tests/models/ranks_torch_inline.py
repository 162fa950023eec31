"""What the ranks run of layers whose MLP is part of their forward, as units of FSDP2. See tests/ranks.py."""

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.models.supported import IDS, build
from tests.models.test_torch_models import Adapter
from tests.plans.ranks_torch_plans import full
from tiled_torch import tile_model, tiling_paths


def sharded(rank: int, world: int, kind: str, units: str) -> dict[str, Any]:
    """The largest relative error of a gradient against the untiled model on all rows, and the paths.

    units: "layers", "adapters" (layers with a LoRA pair around fc1), or "linears": fc1 and fc2 are units of their own too.
    """
    torch.manual_seed(0)
    model: Any = build(kind)
    stack: Any = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    if units == "adapters":
        for layer in stack:
            layer.fc1 = Adapter(layer.fc1)
    untiled = copy.deepcopy(model)
    expected = _gradients(untiled, slice(0, world))
    tile_model(model, num_shards=3)
    for layer in stack:
        for part in (layer.fc1, layer.fc2) if units == "linears" else ():
            fully_shard(part)
        fully_shard(layer)
    fully_shard(model)
    found = _gradients(model, slice(rank, rank + 1))
    assert found.keys() == expected.keys()
    size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    error = sum(float((found[name] - g).square().sum()) for name, g in expected.items()) ** 0.5 / size
    return {"error": error, "paths": [path for name, path in tiling_paths(model).items() if ".layers." in name]}


def _gradients(model: Any, rows: slice) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"FSDP2-wrapped module .* returned a view"
        )  # nn.Linear does, of [B, S, H]
        model(input_ids=IDS[rows], labels=IDS[rows], use_cache=False).loss.backward()
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}

"""What the ranks run of the page's plain loop under FSDP2. See tests/ranks.py."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.documents import ROOT, unrun
from tests.models.test_torch_models import build
from tests.trainers.ranks_torch_accelerate import IDS
from tiled_torch import tile_model, tiling_paths


def both(*, rank: int, world: int) -> dict[str, Any]:
    """Train the untiled model in one process and, by the lines of the page, the tiled one under FSDP2."""
    untiled = build("llama").float()
    names: dict[str, Any] = {
        "model": build("llama").float(), "tile_model": tile_model, "fully_shard": fully_shard,
        "mesh": init_device_mesh("cpu", (world,)), "policy": MixedPrecisionPolicy(),
    }  # fmt: skip
    exec(unrun(ROOT / "docs/recipes/trainers.md", "fully_shard(layer"), names)
    curves: list[list[float]] = []
    for model, rows in ((untiled, IDS), (names["model"], IDS[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        curves.append([])
        for _ in range(3):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if model is not untiled:
                torch.distributed.all_reduce(mean)
                mean /= world
            curves[-1].append(float(mean))
    kinds = sorted({type(parameter).__name__ for parameter in names["model"].parameters()})
    return {"expected": curves[0], "found": curves[1], "kinds": kinds, "paths": tiling_paths(names["model"])}

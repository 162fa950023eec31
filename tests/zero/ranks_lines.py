"""What the ranks run of the lines that the page of trainers has for DeepSpeed. See tests/ranks.py."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.documents import ROOT, unrun
from tests.models.torch_decoders import batch, decoder
from tests.zero.ranks_zero import deepspeed, engines
from tiled_torch import tile_model, tiling_paths


def both(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Losses of two steps on this rank's sequences, and of the untiled model under the same engine."""
    lines = unrun(ROOT / "docs/recipes/trainers.md", "deepspeed.initialize").replace('"stage": 3', f'"stage": {stage}')
    ids, labels = (part[rank : rank + 1] for part in batch())
    found: dict[str, Any] = {}
    with engines():
        for name, line in (("plain", lambda model: model), ("tiled", partial(tile_model, num_shards=3))):
            torch.manual_seed(0)
            losses: list[float] = []
            model = decoder("llama").float()
            model.register_forward_hook(lambda _, args, outputs, to=losses: to.append(outputs.loss.item()))
            given: dict[str, Any] = {
                "model": model, "tile_model": line, "torch": torch,
                "deepspeed": SimpleNamespace(initialize=partial(deepspeed.initialize, dist_init_required=False)),
                "batches": [dict(input_ids=ids.roll(by), labels=labels.roll(by), use_cache=False) for by in range(2)],
            }  # fmt: skip
            exec(lines, given)
            found[name] = losses
            found["paths"] = sorted(set(tiling_paths(model).values()))
            found["stage"] = given["engine"].zero_optimization_stage()
    return found

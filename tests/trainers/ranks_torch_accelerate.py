"""What the ranks run under accelerate's FSDP2. See tests/ranks.py."""

import os
import warnings
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.models.test_torch_models import build
from tiled_torch import tile_model, tiling_paths

IDS = (torch.arange(4 * 9).reshape(4, 9) * 7) % 31 + 1  # two sequences for each rank
STEPS = 3


def both(*, checkpointing: bool, rank: int, world: int) -> dict[str, Any]:
    """Train the untiled model in one process and the tiled one under FSDP2, with clipping and accumulation of two batches."""
    untiled = build("llama").float()
    plain = torch.optim.AdamW(untiled.parameters(), lr=0.01)
    expected = []
    for _ in range(STEPS):
        loss = sum(untiled(input_ids=IDS[rows], labels=IDS[rows]).loss for rows in ([0, 2], [1, 3])) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(untiled.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        expected.append(float(loss.detach()))
    return {"expected": expected} | _under_fsdp2(untiled, checkpointing, rank, world)


def _under_fsdp2(untiled: torch.nn.Module, checkpointing: bool, rank: int, world: int) -> dict[str, Any]:
    launched = {"ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # of a group that is there already: nobody asks
    for state in (AcceleratorState, PartialState, GradientState):  # of an earlier test in this process
        state._shared_state.clear()
    with warnings.catch_warnings(), patch.dict(os.environ, launched):
        warnings.simplefilter("ignore")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], activation_checkpointing=checkpointing,
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        # accelerate ignores the plugin where there is no accelerator, without a word: what it would set on one.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        model = tile_model(build("llama").float(), num_shards=3)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        found = []
        for _ in range(STEPS):
            total = torch.zeros(())
            for rows in (
                rank,
                rank + 2,
            ):  # of [0, 2] and [1, 3] this rank's: the mean over ranks and batches is the same
                with accelerator.accumulate(model):
                    loss = model(input_ids=IDS[rows : rows + 1], labels=IDS[rows : rows + 1]).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach() / 2
            found.append(float(accelerator.reduce(total, "mean")))
    kinds = [type(parameter).__name__ for parameter in model.parameters()]
    whole: dict[str, Any] = {
        name.replace("_checkpoint_wrapped_module.", ""): p.full_tensor().detach()
        for name, p in model.named_parameters()
    }
    error = max(float((whole[name] - p.detach()).norm() / p.detach().norm()) for name, p in untiled.named_parameters())
    return {"found": found, "kinds": kinds, "paths": tiling_paths(model), "error": error}

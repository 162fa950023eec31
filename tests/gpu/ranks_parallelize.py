"""What every process of test_parallelize.py runs on its GPU: a configuration against the same model in one process."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel
from tests.models.torch_decoders import BATCH, batch, decoder, truth
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch import tile_model
from tiled_torch.parallel import parallelize

SHARDED, TENSOR = DataParallel(shard_axis="x", reduce_dtype=None), TensorParallel(axis="x")
# Name -> (configuration over one axis of all GPUs, tiled).
CASES: dict[str, tuple[ParallelConfig, bool]] = {
    "fsdp": (ParallelConfig(data=SHARDED, checkpointing=Checkpointing()), True),
    "fsdp, offload": (ParallelConfig(data=DataParallel(shard_axis="x", reduce_dtype=None, cpu_offload=True)), True),
    "ddp": (ParallelConfig(data=DataParallel(engine="ddp", shard_axis="x", reduce_dtype=None)), True),
    "tp": (ParallelConfig(tensor=TensorParallel(axis="x", sequence_parallel=False)), True),
    "sp": (ParallelConfig(tensor=TENSOR, checkpointing=Checkpointing()), True),
    "sp, untiled": (ParallelConfig(tensor=TENSOR), False),
    "compiled": (ParallelConfig(compile=Compile(), data=SHARDED), True),
    "asynchronous": (ParallelConfig(tensor=TensorParallel(axis="x", asynchronous=True), compile=Compile()), False),
}


def errors(rank: int, world: int, device: torch.device, name: str) -> tuple[float, float]:
    """Of the loss and of all gradients, in float64."""
    config, tiled = CASES[name]
    expected_loss, expected = truth("llama", device=device)
    model = decoder().to(device)
    if tiled:
        tile_model(model, num_shards=3)
    model = parallelize(model, init_device_mesh(device.type, (world,), mesh_dim_names=("x",)), config)
    parts, part = (world, rank) if config.data is not None else (1, 0)
    rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    ids, labels = (a[rows].to(device) for a in batch())
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    stored = {(p.device.type, p.grad.device.type) for p in model.parameters() if p.grad is not None}
    offloaded = config.data is not None and config.data.cpu_offload
    place = "cpu" if offloaded else device.type
    assert stored == {(place, place)}, f"parameters and their gradients are on {stored}"
    found = {key.removeprefix("module."): full(p.grad) for key, p in model.named_parameters()}
    mean = loss.detach().double()
    dist.all_reduce(mean)
    off = abs(mean.item() / world - expected_loss) / expected_loss
    return off, error_between({key: None if g is None else g.cpu() for key, g in found.items()}, expected)


def answers(rank: int, world: int, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Every case that this machine can do; an error is its text, after which the group is not used again."""
    for name in CASES:
        if name == "asynchronous" and (device.type == "cpu" or world == 1):
            continue
        try:
            yield name, errors(rank, world, device, name)
        except Exception as error:
            yield name, repr(error)
            return

"""What the ranks run for `DataParallel(loss_mean="tokens")`: labels that count in unequal numbers. See tests/ranks.py."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from tests.models.torch_decoders import VOCAB, decoder
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize

ROWS, LENGTH = 8, 12
LAYOUTS: dict[str, dict[str, int]] = {
    "ddp": {"dp_shard": 0},
    "fsdp": {"dp_shard": 0},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "fsdp x cp": {"dp_shard": 2, "cp": 2},
}


def ragged() -> tuple[Tensor, Tensor]:
    """Ids and labels: of the first rows most count, of the last ones none."""
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    return ids, labels


def config_of(name: str) -> ParallelConfig:
    axes = LAYOUTS[name]
    data = DataParallel(
        engine="ddp" if name == "ddp" else "fsdp",
        replicate_axis="dp_replicate" if "dp_replicate" in axes else None,
        context_axis="cp" if "cp" in axes else None,
        reduce_dtype=None,
        loss_mean="tokens",
    )
    return ParallelConfig(tensor=TensorParallel() if "tp" in axes else None, data=data)


def token_mean(rank: int, world: int, names: list[str], **options: Any) -> dict[str, dict[str, float]]:
    """Layout -> errors of loss and gradients against one process that has all rows, and how much the loss is another one's."""
    found = {}
    shapes = {name: tuple(ranks or world for ranks in LAYOUTS[name].values()) for name in names}
    meshes = {name: init_device_mesh("cpu", shapes[name], mesh_dim_names=(*LAYOUTS[name],)) for name in names}
    for name, mesh in meshes.items():  # all made before the first is used: see ranks_torch_plans.mesh_of
        parts = [mesh[axis] for axis in mesh.mesh_dim_names or () if axis.startswith("dp")]
        place, count = 0, 1
        for part in parts:
            place, count = place * part.size() + part.get_local_rank(), count * part.size()
        rows = slice(place * ROWS // count, (place + 1) * ROWS // count)
        found[name] = _errors(parallelize(_tiled(), mesh, config_of(name)), rows, count, **options)
    return found


def _tiled() -> Any:
    return tile_model(decoder(), num_shards=3)


def _errors(model: Any, rows: slice, ranks: int, micro_batches: int = 1, as_trainer: bool = False) -> dict[str, float]:
    ids, labels = ragged()
    whole = decoder()
    expected = tile_model(whole, num_shards=3)(input_ids=ids, labels=labels, use_cache=False).loss
    expected.backward()
    mine, wanted = ids[rows], labels[rows]
    given = {}
    if (
        micro_batches > 1 or as_trainer
    ):  # Hugging Face's Trainer counts the labels of all ranks, and multiplies by the ranks
        counted = labels if as_trainer else wanted
        given["num_items_in_batch"] = (counted[:, 1:] != -100).sum()
    total = 0.0
    for part, (few, few_labels) in enumerate(zip(mine.chunk(micro_batches), wanted.chunk(micro_batches), strict=True)):
        last = part + 1 == micro_batches
        held = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
        if hasattr(model, "set_requires_all_reduce"):
            model.set_requires_all_reduce(last)
        with held:
            loss = model(input_ids=few, labels=few_labels, use_cache=False, **given).loss * (ranks if as_trainer else 1)
            loss.backward()
        total += loss.item()
    gradients = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    exact = {name: p.grad for name, p in whole.named_parameters()}
    return {
        "loss": abs(total / expected.item() - 1),
        "gradients": error_between(gradients, exact),  # type: ignore[arg-type]
    }

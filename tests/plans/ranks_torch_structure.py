"""What ranks run for models whose plan is found by structure: losses and gradients against one process (tests/ranks.py)."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig
from tests.models.supported import IDS, build, exact_losses
from tests.plans.ranks_torch_plans import full
from tiled_torch import tile_model, tiling_paths
from tiled_torch.parallel import parallelize
from tiled_torch.plans.registry import plan_of

# As many labels count in every sequence, so that the mean over ranks is the mean over all.
LABELS = IDS.clone()
LABELS[:, ::4] = -100

CONFIGS: dict[str, Any] = {
    "full": Checkpointing(),
    "offload": Checkpointing(offload=True),
    "products": Checkpointing(mode="products"),
    "none": None,
}


def step(model: Any, rows: slice) -> tuple[float, dict[str, torch.Tensor | None]]:
    with exact_losses():
        torch.manual_seed(1)
        loss = model(input_ids=IDS[rows], labels=LABELS[rows]).loss
        loss.backward()
    return loss.item(), {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}


def sharded(
    rank: int, world: int, kinds: list[str], *, checkpointing: str = "full", scope: str | None = "mlp", images: bool = False,
    compiled: bool = False, **options: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """By kind of model: errors, how many units there are, and how the model is tiled. options: of DataParallel."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    answers = {}
    for kind in kinds:
        expected_loss, expected = step(build(kind, images=images), slice(None))
        model = build(kind, images=images)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what tile_model leaves
            if scope is not None:
                tile_model(model, num_shards=2, scope=scope)  # type: ignore[arg-type]
            layers = plan_of(model).blocks_of(model)
            data = DataParallel(reduce_dtype=None, **options)
            config = ParallelConfig(
                data=data, checkpointing=CONFIGS[checkpointing], compile=Compile() if compiled else None
            )
            model = parallelize(model, mesh, config)
            rows = len(IDS) // world
            loss, found = step(model, slice(rank * rows, (rank + 1) * rows))
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        answers[kind] = {
            "loss": abs(mean.item() / world - expected_loss) / abs(expected_loss),
            "gradients": _error(found, expected),
            "units": sum("FSDP" in type(module).__name__ for module in model.modules()),
            "layers": len(layers),
            "recomputed": sum(hasattr(layer, "_checkpoint_contexts") for layer in layers),
            "paths": tiling_paths(getattr(model, "module", model)),
        }
    return answers


def _error(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> float:
    """The relative L2 distance of all gradients together; infinite where one is missing or added."""
    if {n for n, g in found.items() if g is not None} != {n for n, g in expected.items() if g is not None}:
        return float("inf")
    pairs = [(g, expected[name]) for name, g in found.items() if g is not None]
    distance = sum(float((a - b).double().square().sum()) for a, b in pairs)  # type: ignore[operator]
    return (distance / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5  # type: ignore[union-attr]

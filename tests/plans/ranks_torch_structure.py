"""What ranks run for models whose plan is found by structure: losses and gradients against one process (tests/ranks.py)."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig
from tests.models.supported import IDS, build, exact_losses
from tests.plans.ranks_torch_plans import full
from tiled_torch import tile_model, tiling_paths
from tiled_torch.parallel import parallelize
from tiled_torch.plans.data import sharing_layers
from tiled_torch.plans.registry import Plan, plan_of, register_plan

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
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")  # of what tile_model leaves
            if scope is not None:
                tile_model(model, num_shards=2, scope=scope)  # type: ignore[arg-type]
            plan = plan_of(model)
            layers, sharing = plan.blocks_of(model), sharing_layers(model, (*plan.towers, plan.blocks))
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
            "sharing": len(sharing),
            "recomputed": sum(hasattr(layer, "_checkpoint_contexts") for layer in layers),
            "told": [text for each in told if (text := str(each.message)).startswith("parallelize: ")],
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


def in_16_bits(rank: int, world: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """By kind of model, in bfloat16: whether logits are those of one process, and the positions that layers are given."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    answers = {}
    for kind in kinds:
        alone = build(kind)
        for parameter in alone.parameters():  # buffers stay as they are, as they do in a sharded model
            parameter.data = parameter.data.bfloat16()
        expected = alone(input_ids=IDS, use_cache=False).logits
        model = build(kind)
        given: list[torch.Tensor] = []

        def keep(module: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor] = given) -> None:
            given.extend(kwargs["position_embeddings"])

        for layer in plan_of(model).blocks_of(model):
            layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)  # type: ignore[union-attr]
        model = parallelize(model, mesh, ParallelConfig(data=DataParallel(param_dtype="bfloat16")))
        found = model(input_ids=IDS, use_cache=False).logits
        answers[kind] = {
            "same": torch.equal(found, expected),
            "dtypes": sorted({str(positions.dtype) for positions in given}),
            "tensors": len({positions.data_ptr() for positions in given}),
        }
    return answers


class _Wide(nn.Module):
    """A block whose inputs are float32: what is added to it and, by name, its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale[places]


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Wide(), _Wide()])
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + self.shift, scale=self.shift, places=torch.arange(4))
        return x


def wide_inputs(rank: int, world: int) -> str:
    """Return the dtype of what blocks return that get float32: buffers are no parameters, and stay as they are."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    register_plan(_Blocks, Plan(blocks="blocks"), replace=True)
    model = parallelize(_Blocks(), mesh, ParallelConfig(data=DataParallel(param_dtype="bfloat16")))
    return str(model(torch.ones(2, 4)).dtype)

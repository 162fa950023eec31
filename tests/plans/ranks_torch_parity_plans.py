"""What the ranks run when `parallelize` of the halves is compared: loss and whole gradients of a Llama. See tests/ranks.py."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from tests.models.torch_decoders import exact
from tests.plans.ranks_torch_plans import full
from tests.tiny_model import tiny_config, tiny_weights
from tiled_torch.commands.finetune.trainer import build_model
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize

STEPS = {"tensor": TensorParallel, "checkpointing": Checkpointing, "data": DataParallel}


def models(rank: int, world: int, tokens: list[list[int]], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loss of the whole batch and, from rank 0, every gradient by name, for every case."""
    return [_model(rank, torch.tensor(tokens), **case) for case in cases]


def _model(
    rank: int,
    tokens: Tensor,
    axes: dict[str, int],
    config: dict[str, Any],
    changes: dict[str, Any],
    angles: list[Any],
) -> dict[str, Any]:
    """`config`: the fields of a ParallelConfig that are not None. `angles`: cosine and sine of every position."""
    described = tiny_config(**changes)
    model = exact(build_model(described, tiny_weights(described), torch.device("cpu")).double())
    # Its own angles are float32, whose roundings would be all that is seen here.
    cos, sin = (torch.tensor(a, dtype=torch.float64).repeat(1, 2)[None] for a in angles)
    model.model.rotary_emb.forward = lambda x, position_ids: (cos[:, position_ids[0]], sin[:, position_ids[0]])
    tile_model(model, num_shards=3)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel = ParallelConfig(**{step: STEPS[step](**fields) for step, fields in config.items()})
    with Lines("tiled_torch") as log:
        split: Any = parallelize(model, mesh, parallel)
    rows = tokens
    for axis in axes:
        rows = rows if axis in ("tp", "cp") else rows.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
    if "cp" in axes:  # whose ranks the last token would leave with unequal runs
        loss = split(input_ids=rows[:, :-1], shift_labels=rows[:, 1:]).loss
    else:
        loss = split(input_ids=rows, labels=rows).loss
    loss.backward()
    gradients = {name.removeprefix("module."): full(parameter.grad) for name, parameter in split.named_parameters()}
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = {name: None if grad is None else grad.tolist() for name, grad in gradients.items()}
    return {
        "loss": mean.item() / dist.get_world_size(),
        "gradients": found if rank == 0 else {},
        "log": log.lines,
    }


class Lines(logging.Handler):
    """What a logger is told."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self.logger, self.lines = logging.getLogger(name), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Lines":
        self.before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)

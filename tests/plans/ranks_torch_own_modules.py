"""What the ranks run for `parallelize` of the library's own modules, each of them the whole model. See tests/ranks.py."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared_specs import SpecError
from shared_specs.config import ParallelConfig, TensorParallel
from tests.models.torch_decoders import BATCH
from tests.plans.ranks_torch_plans import CONFIGS, error_between, filled, full, mesh_of, rows_of
from tiled_torch import TiledLinear, TiledLinearCrossEntropy, TiledMLP
from tiled_torch.parallel import parallelize

TOKENS, HIDDEN, VOCAB = 8, 8, 11


def mlp() -> nn.Module:
    return filled(TiledMLP(HIDDEN, 12, bias=True, num_shards=3))


def head() -> nn.Module:
    return filled(TiledLinearCrossEntropy(HIDDEN, VOCAB, bias=True, num_shards=2))


def linear() -> nn.Module:
    return filled(TiledLinear(HIDDEN, 10, in_splits=2, out_splits=3))


def refused(rank: int, world: int) -> str:
    """A TiledLinear that tensor parallelism is asked for."""
    model = linear()
    try:
        parallelize(model, mesh_of(("tp",), world), ParallelConfig(tensor=TensorParallel()))
    except SpecError as error:
        return str(error)
    return "accepted"


def modules(rank: int, world: int, names: list[str]) -> dict[str, float]:
    """Errors of all gradients, of configurations by name."""
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
    plain: Any = {"mlp": mlp(), "head": head(), "linear": linear()}
    for kind in ("mlp", "linear"):
        (plain[kind](x).square().sum() / BATCH).backward()
    plain["head"](x, targets).backward()
    found = {}
    for name in names:
        axes, config = CONFIGS[name]
        mesh = mesh_of(axes, world)
        rows = rows_of(mesh, config)
        own, sequences = x[rows], rows.stop - rows.start
        if config.tensor is not None and config.tensor.sequence_parallel:
            tensor = mesh[config.tensor.axis]
            own = own.chunk(tensor.size(), 1)[tensor.get_local_rank()]
        kinds = {"mlp": mlp, "head": head} | ({"linear": linear} if config.tensor is None else {})
        split: Any = {kind: parallelize(build(), mesh, config) for kind, build in kinds.items()}
        for kind in (kind for kind in kinds if kind != "head"):  # in one order on every rank
            (split[kind](own).square().sum() / sequences).backward()
        split["head"](x[rows], targets[rows]).backward()
        if "linear" in kinds and config.data.engine == "fsdp":
            tiles = [tile for row in split["linear"].linears for tile in row]
            assert len(tiles) == 6
            assert all(isinstance(tile, FSDPModule) for tile in tiles)
        for kind, module in split.items():
            grads = {key.removeprefix("module."): full(p.grad) for key, p in module.named_parameters()}
            found[f"{kind} {name}"] = error_between(grads, {key: p.grad for key, p in plain[kind].named_parameters()})
    return found

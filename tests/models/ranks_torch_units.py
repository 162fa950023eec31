"""What two ranks run of models in units of FSDP2, the head in one of its own or with others. See tests/ranks.py."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared_specs import UnsupportedError
from tests.models.supported import IDS, build
from tests.plans.ranks_torch_plans import full
from tiled_torch import tile_model, tiled_model_loss, tiling_paths

Step = tuple[Tensor, Tensor, dict[str, Any]]


def in_units(
    rank: int, world: int, kind: str, units: str, policy: tuple[str | None, str | None], reshard: bool
) -> dict[str, Any]:
    """Relative errors of losses, the logits and the gradients of two micro-batches, tiled and untiled in the same units.

    Of several losses, since the error of one number may be none by chance.

    units: "own": the head is one. "tail": with what is before it, as accelerate makes it. policy: dtypes of parameters and
    outputs.
    """
    untiled = build(kind).float()
    exact = copy.deepcopy(untiled).double()
    expected = [_step(exact, slice(i, i + 1)) for i in range(world)]
    gradients: dict[str, Any] = {name: sum(step[2][name] for step in expected) / world for name in expected[0][2]}
    found: dict[str, Any] = {}
    for name, model in (("untiled", copy.deepcopy(untiled)), ("tiled", tile_model(untiled, num_shards=3))):
        _shard(model, units, policy, reshard)
        step = _step(model, slice(rank, rank + 1))
        size = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        found[name] = [float((a - b).norm() / b.norm()) for a, b in zip(step[:2], expected[rank][:2], strict=True)]
        found[name].append(sum(float((step[2][key] - g).square().sum()) for key, g in gradients.items()) ** 0.5 / size)
        found[f"{name} dtypes"] = [str(step[0].dtype), str(step[1].dtype)]
    return found | {"paths": tiling_paths(untiled)}


def _shard(model: Any, units: str, policy: tuple[str | None, str | None], reshard: bool) -> None:
    of_parameters, of_outputs = (None if name is None else getattr(torch, name) for name in policy)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(of_parameters, output_dtype=of_outputs)}
    for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(layer, **options)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    norm = next(m for name, m in model.named_modules() if name.rpartition(".")[2] in ("norm", "ln_f"))
    before = [norm, embedding] if head.weight is embedding.weight else [norm]
    fully_shard([*before, head] if units == "tail" else head, **options, reshard_after_forward=reshard)
    fully_shard(model, **options)


def _step(model: Any, rows: slice) -> Step:
    """The second of two micro-batches, whose gradients are reduced together; its loss, and those of other tokens."""
    model.zero_grad()
    with torch.no_grad():
        others = [(IDS[rows] * factor) % 50 + 3 for factor in (3, 7, 9, 11, 13, 17, 19)]
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in others]
    for last in (False, True):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        outputs = model(input_ids=IDS[rows], labels=IDS[rows], use_cache=False)
        logits = 1 * outputs.logits.detach()  # read after forward
        (outputs.loss / 2).backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack([outputs.loss.detach(), *losses]), logits, gradients


def refused(rank: int, world: int, kind: str) -> dict[str, str]:
    """What is said of logits that are differentiated, and of those that are read after an optimizer's step."""
    model, found = tile_model(build(kind).float()), {}
    _shard(model, "own", (None, None), True)
    outputs = model(input_ids=IDS, labels=IDS)
    try:
        outputs.logits.square().sum().backward()
    except UnsupportedError as error:
        found["differentiated"] = str(error)
    model = tile_model(build(kind).float())
    _shard(model, "own", (None, None), True)
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    try:
        outputs.logits.sum()
    except RuntimeError as error:
        found["changed"] = str(error)
    return found


def model_loss(rank: int, world: int, engine: str) -> float:
    """The largest relative error of the gradients of `tiled_model_loss` in an engine, each rank with sequences of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 64)).double()
    expected = copy.deepcopy(model)
    for row in range(world):
        logits = expected(IDS[row : row + 1, :-1])
        (F.cross_entropy(logits.flatten(0, 1), IDS[row, 1:]) / world).backward()
    engaged: Any = fully_shard(model, reshard_after_forward=True) if engine == "fsdp" else None
    if engaged is None:
        engaged = DistributedDataParallel(model, find_unused_parameters=True)
    own = IDS[rank : rank + 1]
    tiled_model_loss(engaged, own[:, 1:], own[:, :-1], num_shards=3).backward()
    found: list[Any] = [full(parameter.grad) for parameter in model.parameters()]
    truth: list[Any] = [parameter.grad for parameter in expected.parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))

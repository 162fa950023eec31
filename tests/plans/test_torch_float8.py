"""The float8 option of `parallelize`: which layers torchao is asked to convert, what is refused and why.

torchao is no requirement and its kernels need a GPU: here a stand-in for its one function records the call. `make float8`
runs torchao itself, its products emulated (tests/float8).
"""

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from shared_specs.config import Checkpointing, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError, UnsupportedError
from tests.models.torch_decoders import decoder
from tiled_torch import TiledMLP
from tiled_torch.models import tile_model, tiling_paths
from tiled_torch.parallel import parallelize
from tiled_torch.plans import api as plans_api
from tiled_torch.plans import float8

CONFIG = ParallelConfig(float8=True)
SIZES = {"intermediate_size": 32, "num_hidden_layers": 2}


class Converted(nn.Linear):
    """Stands where torchao's Float8Linear would."""


def convert(model: nn.Module, *, module_filter_fn: Any, config: Any = None) -> nn.Module:
    """As torchao.float8.convert_to_float8_training of version 0.18: children in place, a model that is a layer returned."""
    assert not isinstance(model, nn.Linear)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module_filter_fn(module, name):
            module.__class__ = Converted
    return model


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.convert_to_float8_training = convert
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with the package."""
    stand_in(monkeypatch)
    monkeypatch.setattr(plans_api, "reason_no_float8", lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"config.float8 must be False here, got True. The package torchao is not"
    ):
        parallelize(decoder(**SIZES), None, CONFIG)
    monkeypatch.undo()
    stand_in(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"got True. It needs a GPU of compute capability 8.9"):
        parallelize(decoder(**SIZES), None, CONFIG)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("tiled", [False, True])
def test_layers_of_the_blocks_are_converted(tiled: bool) -> None:
    """Neither the head nor a layer whose sizes are no multiples of 16."""
    model = decoder(**SIZES)
    model.model.layers[1].mlp.down_proj = nn.Linear(32, 24)
    if tiled:
        tile_model(model, num_shards=3)
    parallelize(model, None, CONFIG)
    found = {name for name, module in model.named_modules() if isinstance(module, Converted)}
    projections = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    expected = {f"model.layers.{number}.{name}" for number in range(2) for name in projections}
    assert found == expected - {"model.layers.1.mlp.down_proj"}
    paths = {"model.layers.0.mlp": "tile: gate_proj is Converted", "lm_head": "tiled_linear_cross_entropy"}
    assert {name: path for name, path in tiling_paths(model).items() if name in paths} == (paths if tiled else {})


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("build", "config", "words"),
    [
        (lambda: TiledMLP(16, 32), CONFIG, "False where no linear layer of a block can be converted"),
        (lambda: decoder(hidden_size=8, head_dim=2), CONFIG, "False where no linear layer of a block can be converted"),
        (
            lambda: tile_model(decoder(**SIZES)),
            ParallelConfig(float8=True, checkpointing=Checkpointing(mode="products")),
            'must be "full" or "layers" with config.float8 where the model is tiled',
        ),
        (
            lambda: tile_model(decoder(**SIZES)),
            ParallelConfig(float8=True, checkpointing=Checkpointing(mode="op")),
            "with config.float8 where the model is tiled, got 'op'",
        ),
    ],
)
def test_refused_before_the_model_is_touched(build: Any, config: ParallelConfig, words: str) -> None:
    model = build()
    with pytest.raises((SpecError, UnsupportedError), match=words):
        parallelize(model, None, config)
    assert not any(isinstance(module, Converted) for module in model.modules())


@pytest.mark.usefixtures("usable")
def test_not_in_a_tiled_model_that_is_split() -> None:
    plan = plans_api.plan_of(model := tile_model(decoder(**SIZES)))
    config = ParallelConfig(float8=True, tensor=TensorParallel())
    words = "config.float8 must be False with config.tensor where the model is tiled, got True"
    with pytest.raises(UnsupportedError, match=words):
        float8.check_float8("parallelize", config, model, plan)

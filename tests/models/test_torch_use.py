"""What people do with a tiled model beside training it: copies, pickles, torch.compile."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared_specs import UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.models.test_torch_models import IDS, assert_same, build, loss_and_gradients
from tiled_torch import tile_model, tiling_paths, untile_model


def pickled(model: Any) -> Any:
    """Through torch.save, in whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["copied", "pickled"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_copy_is_a_tiled_model_of_its_own(kind: str, again: Callable[[Any], Any]) -> None:
    model = tile_model(build(kind), num_shards=3)
    expected = loss_and_gradients(model)
    twin = again(model)
    assert type(twin) is type(model)
    assert tiling_paths(twin) == tiling_paths(model)
    assert_same(loss_and_gradients(twin), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(loss_and_gradients(twin), expected)  # its weights are its own
    assert_same(loss_and_gradients(untile_model(twin)), expected)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
def test_compiles_as_one_graph() -> None:
    model = tile_model(build("llama"), num_shards=3)
    loss, gradients = loss_and_gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    found = compiled(input_ids=IDS, labels=IDS).loss
    found.backward()
    pairs = [(found.detach(), loss), *((model.get_parameter(name).grad, grad) for name, grad in gradients.items())]
    for ours, eager in pairs:
        assert relative_error(ours.numpy(), eager.numpy()) <= DISTRIBUTED_FLOAT64


def test_untiling_what_was_wrapped_changes_nothing() -> None:
    model: Any = tile_model(build("llama"))
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Wrapped", (type(mlp),), {})
    before, paths = [type(module) for module in model.modules()], tiling_paths(model)
    with pytest.raises(UnsupportedError, match="model must be free of classes added after tiling, got Wrapped"):
        untile_model(model)
    assert [type(module) for module in model.modules()] == before
    assert tiling_paths(model) == paths

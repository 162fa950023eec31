"""`tile_model(scope="block")` of layers that multiply queries by a function of their positions: Ministral 3's, Mistral 4's."""

from typing import Any

import pytest
import torch
import transformers

from tests.models.test_torch_block import LATENT, SCALING, assert_equal, gradients, layer_paths
from tests.models.test_torch_models import IDS, SIZES, assert_same, build, loss_and_gradients
from tests.models.test_torch_ranks_block import assert_exact
from tests.models.torch_decoders import exact
from tests.ranks import Ranks
from tiled_torch import tile_model, tiling_paths, untile_model

MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
KINDS = ("ministral3", "mistral4")


def scaled(kind: str) -> Any:
    """A small model, of whose nine positions the scale is another from the fifth on; Mistral 4's second layer is a mixture."""
    sizes = {"num_attention_heads": 4, "rope_parameters": {**SCALING}}
    if kind == "ministral3":
        model = build(kind, **sizes)
    else:
        config = transformers.Mistral4Config(**SIZES | LATENT | MIXTURE | sizes)
        torch.manual_seed(0)
        made = transformers.Mistral4ForCausalLM._from_config(config, experts_implementation="eager")
        model = made.double()
    model = exact(model.train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind: str) -> None:
    model = scaled(kind)
    expected = loss_and_gradients(model)
    tile_model(model, scope="block", num_shards=4)
    assert_same(loss_and_gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_inputs_that_wait_in_host_memory(kind: str) -> None:
    model, mask = scaled(kind), torch.ones_like(IDS)
    mask[0, :3] = 0
    every: list[dict[str, Any]] = [
        {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        {"position_ids": torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2]).expand_as(IDS)},
    ]
    expected = [gradients(model, **given) for given in every]
    tile_model(model, scope="block", num_shards=3)
    for offload in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
        for given, wanted in zip(every, expected, strict=True):
            assert_equal(gradients(model, **given), wanted)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_that_are_written_before_backward(kind: str) -> None:
    """The scales are those of forward."""
    model, positions = scaled(kind), torch.arange(IDS.shape[1]).expand_as(IDS).clone()

    def found() -> dict[str, torch.Tensor]:
        model.zero_grad()
        positions.copy_(torch.arange(IDS.shape[1]).expand_as(IDS))
        loss = model.model(input_ids=IDS, position_ids=positions, use_cache=False).last_hidden_state.square().sum()
        positions.zero_()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = found()
    tile_model(model.model, scope="block", num_shards=3)
    assert_equal(found(), expected)


def test_a_layer_without_positions_runs_as_its_class_does() -> None:
    model = tile_model(scaled("ministral3"), scope="block", num_shards=2)
    x = torch.randn(*IDS.shape, 16, dtype=torch.float64)
    places = model.model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    with pytest.raises(TypeError), pytest.warns(UserWarning, match="called without its positions"):
        model.model.layers[0](x, position_embeddings=places)
    assert tiling_paths(model)["model.layers.0"] == "mlp: it was called without its positions"


@pytest.mark.parametrize("kind", KINDS)
def test_untiled_again_and_generation(kind: str) -> None:
    model = scaled(kind).eval()
    classes = [type(module) for module in model.modules()]
    expected = model.generate(IDS[:, :6], max_new_tokens=3, do_sample=False)
    tile_model(model, scope="block", num_shards=2)
    assert torch.equal(model.generate(IDS[:, :6], max_new_tokens=3, do_sample=False), expected)
    assert [type(module) for module in untile_model(model).modules()] == classes


@pytest.mark.deep
@pytest.mark.ranks
def test_layers_whose_weights_are_split(pools: dict[int, Ranks]) -> None:
    """A rank's shard of tokens has the scales of its own rows, of whole tokens and of a rank's own."""
    assert_exact(pools[2].run("tests.models.ranks_torch_block:scaled", rope_parameters=SCALING))

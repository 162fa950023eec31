"""`tile_model(scope="block")` of layers whose attention is of another form: sinks, latents, fused heads, side by side."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.models.test_torch_block import CHANGES, assert_equal, gradients, layer_paths
from tests.models.test_torch_models import IDS, Adapter, assert_same, build, loss_and_gradients
from tests.models.torch_decoders import exact
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.block.layer import TiledNorm

FORMS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4},
    **{kind: CHANGES.get(kind, {}) for kind in ("deepseek_v3", "gpt_neox", "phi", "exaone4", "hunyuan_v1_dense")},
}
FORMS["gpt_oss"] |= {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def form(kind: str, **changes: Any) -> Any:
    """A small model whose parameters are all unlike one another."""
    options = {"num_attention_heads": 4, "attn_implementation": "eager"} | FORMS[kind] | changes
    model = exact(build(kind, **options).train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("kind", FORMS)
def test_loss_logits_and_the_last_norm(kind: str) -> None:
    model = form(kind)
    expected, logits = loss_and_gradients(model), model(IDS).logits.detach()
    tile_model(model, scope="block", num_shards=4)
    assert_same(loss_and_gradients(model), expected)
    found = torch.as_tensor(model(IDS, labels=IDS).logits).detach()
    assert relative_error(found.numpy(), logits.numpy()) <= DISTRIBUTED_FLOAT64
    assert layer_paths(model) == {"tiled_block"}
    assert sum(isinstance(module, TiledNorm) for module in model.modules()) == 1


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("kind", FORMS)
def test_padded_and_packed_inputs_that_wait_in_host_memory(kind: str) -> None:
    model = form(kind, attn_implementation="eager" if kind == "gpt_oss" else "sdpa")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    inputs: list[dict[str, Any]] = [
        {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        {"position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2]).expand_as(IDS)},
    ]
    expected = [gradients(model, **given) for given in inputs]
    tile_model(model, scope="block", num_shards=3)
    model.activation_checkpointing_enable(offload=True)
    for given, wanted in zip(inputs, expected, strict=True):
        assert_equal(gradients(model, **given), wanted)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sinks(dropout: float) -> None:
    """A hook of them fires once, with the sum over heads that attended one group after the other; frozen ones have none."""
    model, calls = form("gpt_oss", attention_dropout=dropout), []
    layers: Any = model.model.layers
    layers[1].self_attn.sinks.requires_grad_(False)
    expected = gradients(model)
    assert expected["model.layers.0.self_attn.sinks"].count_nonzero() == 4
    tile_model(model, scope="block", num_shards=3)
    layers[0].self_attn.sinks.register_hook(lambda gradient: calls.append(gradient.shape))
    assert_equal(gradients(model), expected)
    assert calls == [(4,)]
    assert layer_paths(model) == {"tiled_block"}


ADAPTED = {
    "deepseek_v3": ["self_attn.q_a_proj", "self_attn.kv_b_proj", "self_attn.o_proj"],
    "gpt_neox": ["attention.query_key_value", "mlp.dense_4h_to_h"],
    "phi": ["self_attn.dense", "mlp.fc1"],
    "hunyuan_v1_dense": ["self_attn.k_proj"],
}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters(kind: str) -> None:
    """Every gradient, those of the adapters included; frozen weights have none."""
    model = form(kind)
    layer = model.base_model.layers[0]
    for name in ADAPTED[kind]:
        layer.set_submodule(name, Adapter(layer.get_submodule(name)))
    expected = gradients(model)
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3)), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "phi"])
def test_autocast(kind: str) -> None:
    """At most twice as wrong as the untiled model under autocast, both against float64.

    Of Phi's biases of keys, which softmax takes out again where they are not turned, rounding is most.
    """
    model = form(kind)
    truth = gradients(model)

    def found() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model.float())

    expected = found()
    tile_model(model, scope="block", num_shards=3)
    for name, gradient in found().items():
        assert gradient.dtype == expected[name].dtype
        error = relative_error(gradient.numpy(), truth[name].numpy())
        assert error <= limit(relative_error(expected[name].numpy(), truth[name].numpy()), "bfloat16"), name
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("kind", ["gpt_neox", "deepseek_v3", "gpt_oss", "phi"])
def test_untiled_again_and_generation(kind: str) -> None:
    model = form(kind).eval()
    classes = [type(module) for module in model.modules()]
    expected = model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False)
    tile_model(model, scope="block", num_shards=2)
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False), expected)
    assert [type(module) for module in untile_model(model).modules()] == classes


@pytest.mark.parametrize("kind", ["gpt_neox", "deepseek_v3"])
def test_a_cache_that_a_model_makes_stays_empty(kind: str) -> None:
    """As one of GPT-NeoX, whose layers have another name for it."""
    model = form(kind)
    expected = loss_and_gradients(model)
    tile_model(model, scope="block", num_shards=3)
    cache = model(input_ids=IDS, labels=IDS, use_cache=True).past_key_values
    assert cache.get_seq_length() == 0
    assert_same(loss_and_gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


def test_a_hook_on_another_attention_leaves_its_layer_to_its_mlp() -> None:
    model = tile_model(form("gpt_neox"), scope="block", num_shards=3)
    model.base_model.layers[0].attention.dense.register_forward_hook(lambda *_: None)
    gradients(model)
    assert layer_paths(model) == {"mlp: attention.dense has hooks", "tiled_block"}
    assert tiling_paths(model)["gpt_neox.layers.0.mlp"] == "tiled_mlp"

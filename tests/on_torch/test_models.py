"""`tile_model` on every known Hugging Face family: the same losses and gradients, keys and files as before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import SpecError, UnsupportedError
from shared_specs.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tiled_torch import backends, tile_model, untile_model
from tiled_torch.models import tiling_paths
from tiled_torch.models.tiling import FAMILIES, family_of

transformers = pytest.importorskip("transformers")

KINDS = (
    "cohere cwm exaone4 gemma gemma2 gemma3_text glm glm4 granite helium llama ministral ministral3 mistral "
    "olmo olmo2 olmo3 phi3 qwen2 qwen3 smollm3"
).split()
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **changes)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(2 * 9).reshape(2, 9) % 31 + 1
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[1].keys() == expected[1].keys()
    for ours, theirs in zip((found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_family(kind: str) -> None:
    model = build(kind)
    keys, expected = list(model.state_dict()), loss_and_gradients(model)
    backends.record_run("tiled_mlp", "nothing")
    assert tile_model(model, num_shards=4, keep=0.5) is model
    assert set(tiling_paths(model).values()) == {"tiled_mlp"}
    assert len(tiling_paths(model)) == 2
    assert_same(loss_and_gradients(model), expected)
    assert backends.last_run("tiled_mlp") == "eager"
    assert list(model.state_dict()) == keys


def test_every_class_of_every_family_is_tested() -> None:
    seen = set()
    for kind in KINDS:
        seen |= {type(module).__name__ for module in build(kind).modules() if family_of(module)}
    assert seen == set().union(*(family.classes for family in FAMILIES))


def test_biases_reach_the_mlp() -> None:
    model = build("llama", mlp_bias=True)
    expected = loss_and_gradients(model)
    assert_same(loss_and_gradients(tile_model(model, num_shards=3)), expected)


def test_untile_restores_the_classes() -> None:
    model = build("llama")
    classes = [type(module) for module in model.modules()]
    expected = loss_and_gradients(model)
    untile_model(tile_model(tile_model(model), num_shards=2))
    assert [type(module) for module in model.modules()] == classes
    assert tiling_paths(model) == {}
    assert_same(loss_and_gradients(model), expected)


def test_save_pretrained_and_load(tmp_path: Any) -> None:
    model = tile_model(build("llama"), num_shards=4)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(loss_and_gradients(loaded), loss_and_gradients(model))


class Adapter(nn.Module):
    """A LoRA-style linear: a frozen base and a trainable low-rank pair."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def test_adapters_and_hooks_go_through_tile() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=4)
    assert set(tiling_paths(model).values()) == {"tile: up_proj is Adapter"}
    assert_same(loss_and_gradients(model), expected)
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.up_proj.base
    calls = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: calls.append(1))
    assert tiling_paths(model)["model.layers.0.mlp"] == "tile: down_proj has hooks"
    loss_and_gradients(model)
    assert calls


def test_keep_is_refused_where_nothing_can_be_kept() -> None:
    model = build("llama")
    model.model.layers[0].mlp.up_proj = Adapter(model.model.layers[0].mlp.up_proj)
    with pytest.raises(SpecError, match=r"tile: keep must be 0, got 0\.5"):
        loss_and_gradients(tile_model(model, num_shards=4, keep=0.5))


def test_unknown_models_are_refused_untouched() -> None:
    with pytest.raises(UnsupportedError, match="tile_model: model must be a model with MLPs of a known family: llama"):
        tile_model(nn.Sequential(nn.Linear(2, 2)))
    model = build("llama")
    model.model.layers[1].mlp.act_fn = nn.Softplus()
    with pytest.raises(UnsupportedError, match=r"activation of model\.layers\.1\.mlp must be one of .* got Softplus"):
        tile_model(model)
    assert tiling_paths(model) == {}


def test_gradient_checkpointing_of_the_model() -> None:
    model = build("llama")
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=4).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model), expected)

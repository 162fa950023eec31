"""`tile_model` on every known Hugging Face family: the same losses and gradients, keys and files as before."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import SpecError, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tiled_torch import backends, tile_model, tiling_paths, untile_model
from tiled_torch.models.causal_lm import PLAIN, SCALED, SOFTCAPPED, TiledCausalLM

transformers = pytest.importorskip("transformers")

KINDS = (
    "cohere cwm exaone4 gemma gemma2 gemma3_text glm glm4 granite helium llama ministral ministral3 mistral "
    "olmo olmo2 olmo3 phi3 qwen2 qwen3 smollm3"
).split()
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


IDS = torch.arange(2 * 9).reshape(2, 9) % 31 + 1


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    return transformers.AutoModelForCausalLM.from_config(config).double()


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the tiled model its own loss; of the untiled one its definition, since transformers computes it in float32."""
    ids = IDS
    model.zero_grad()
    if any(isinstance(module, TiledCausalLM) for module in model.modules()):
        loss = model(input_ids=ids, labels=ids).loss
    else:
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
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
    for function in ("tiled_mlp", "tiled_linear_cross_entropy"):
        backends.record_run(function, "nothing")
    assert tile_model(model, num_shards=4, keep=0.5) is model
    paths = tiling_paths(model)
    assert paths.pop("lm_head") == "tiled_linear_cross_entropy"
    assert list(paths.values()) == ["tiled_mlp"] * 2
    assert_same(loss_and_gradients(model), expected)
    assert backends.last_run("tiled_mlp") == "eager"
    assert backends.last_run("tiled_linear_cross_entropy") == "eager"
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("kind", ["phi3", "glm4", "llama"])
def test_main_grad_of_the_mlps(kind: str) -> None:
    """Of fused gate and up as well: where every MLP weight has a main_grad, that takes its gradient."""
    model = build(kind)
    _, expected = loss_and_gradients(model)
    tile_model(model, num_shards=3)
    weights = {name: p for name, p in model.named_parameters() if ".mlp." in name}
    for weight in weights.values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    _, found = loss_and_gradients(model)
    assert len(weights) == (4 if kind != "llama" else 6)
    for name, weight in weights.items():
        assert weight.grad_added_to_main_grad
        assert relative_error((weight.main_grad - 1).numpy(), expected[name].numpy()) <= DISTRIBUTED_FLOAT64
    others = set(found) - set(weights)
    assert all(relative_error(found[n].numpy(), expected[n].numpy()) <= DISTRIBUTED_FLOAT64 for n in others)


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


@pytest.mark.parametrize("function", [tile_model, untile_model, tiling_paths])
def test_what_is_no_module_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}: model must be a torch\.nn\.Module, got NoneType\.$"):
        function(None)


def test_save_pretrained_and_load(tmp_path: Any) -> None:
    model = tile_model(build("llama"), num_shards=4)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is transformers.LlamaForCausalLM
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
    assert set(tiling_paths(model).values()) == {"tile: up_proj is Adapter", "tiled_linear_cross_entropy"}
    assert_same(loss_and_gradients(model), expected)
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.up_proj.base
    calls = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: calls.append(1))
    with pytest.warns(UserWarning, match="LlamaMLP runs through tile, which recomputes all of it: down_proj has hooks"):
        loss_and_gradients(model.train())
    assert tiling_paths(model)["model.layers.0.mlp"] == "tile: down_proj has hooks"
    assert calls


def test_keep_is_refused_where_nothing_can_be_kept() -> None:
    model = build("llama")
    model.model.layers[0].mlp.up_proj = Adapter(model.model.layers[0].mlp.up_proj)
    with pytest.raises(SpecError, match=r"tile: keep must be 0, got 0\.5"):
        loss_and_gradients(tile_model(model, num_shards=4, keep=0.5))


def test_a_model_of_which_nothing_can_be_tiled_is_refused() -> None:
    text = r"^tile_model: model must be one with an MLP, or a causal language model's loss, that can be tiled, got Sequential\."
    with pytest.raises(UnsupportedError, match=text):
        tile_model(nn.Sequential(nn.Linear(2, 2)))


def test_an_activation_outside_the_specification_goes_through_tile() -> None:
    model = build("llama")
    model.model.layers[1].mlp.act_fn = nn.Softplus()
    expected = loss_and_gradients(model)
    assert tiling_paths(tile_model(model, num_shards=3))["model.layers.1.mlp"] == "tile: act_fn is Softplus"
    assert_same(loss_and_gradients(model), expected)


def test_gradient_checkpointing_of_the_model() -> None:
    model = build("llama")
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=4).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model), expected)


def test_every_causal_lm_with_a_known_loss_is_tested() -> None:
    assert {type(build(kind)).__name__ for kind in KINDS} == PLAIN | SOFTCAPPED | SCALED.keys()


SCALES = {
    "gemma2": {"final_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 7.0},
    "cohere": {"logit_scale": 3.0},
}


@pytest.mark.parametrize("kind", SCALES)
def test_scaled_and_capped_logits(kind: str) -> None:
    model = build(kind, **SCALES[kind])
    expected = loss_and_gradients(model)
    assert_same(loss_and_gradients(tile_model(model, num_shards=4)), expected)


LOSS_ARGUMENTS: dict[str, dict[str, Any]] = {
    "labels": {"labels": torch.where(IDS % 3 == 0, -100, IDS)},
    "num_items_in_batch": {"labels": IDS, "num_items_in_batch": torch.tensor(40)},
    "num_items_in_batch-int": {"labels": IDS, "num_items_in_batch": 40},
    "shift_labels": {"labels": IDS, "shift_labels": IDS.flip(1)},
    "ignore_index": {"labels": IDS, "ignore_index": 3},
    "tuple": {"labels": IDS, "return_dict": False},
}


@pytest.mark.parametrize("name", LOSS_ARGUMENTS)
def test_the_loss_is_the_one_transformers_computes(name: str) -> None:
    model = build("llama").float()

    def run() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        found = model(input_ids=IDS, **LOSS_ARGUMENTS[name])
        assert isinstance(found, tuple) == (name == "tuple")
        loss = found[0] if isinstance(found, tuple) else found.loss
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    expected, gradients = run()
    tile_model(model, num_shards=4)
    found, ours = run()
    for a, b in zip((found, *ours), (expected, *gradients), strict=True):
        assert relative_error(a.numpy(), b.numpy()) <= MODEL_FLOAT32


def test_logits_only_on_request() -> None:
    model = build("gemma2", final_logit_softcapping=0.5)
    whole = model(input_ids=IDS).logits
    tile_model(model, num_shards=4)
    assert torch.equal(model.eval()(input_ids=IDS).logits, whole)
    few = model(input_ids=IDS, labels=IDS, logits_to_keep=3).logits
    assert relative_error(few.detach().numpy(), whole[:, -3:].detach().numpy()) <= DISTRIBUTED_FLOAT64
    chosen = model(input_ids=IDS, labels=IDS, logits_to_keep=torch.tensor([1, 4])).logits
    assert relative_error(chosen.detach().numpy(), whole[:, [1, 4]].detach().numpy()) <= DISTRIBUTED_FLOAT64


def test_an_adapted_head_goes_through_tiled_loss() -> None:
    model = build("llama")
    model.lm_head = Adapter(model.lm_head)
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=4)
    assert tiling_paths(model)["lm_head"] == "tiled_loss: lm_head is Adapter"
    with pytest.warns(UserWarning, match=r"lm_head is Adapter\. tiled_loss calls it for every shard instead\.$"):
        found = loss_and_gradients(model)
    assert found[1].keys() == expected[1].keys()
    # F.cross_entropy of logits.float(), as transformers does
    for ours, theirs in zip((found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= MODEL_FLOAT32


def test_a_loss_function_of_the_users_is_left_alone() -> None:
    model = tile_model(build("llama"), num_shards=4)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert tiling_paths(model)["lm_head"] == "untiled: its loss_function is <lambda>"
    with pytest.warns(
        UserWarning, match=r"its loss_function is <lambda>\. The logits of all tokens are made for it\.$"
    ):
        found = model(input_ids=IDS, labels=IDS)
    assert torch.equal(found.loss, found.logits.sum())


def test_the_trainer_sees_the_signature_of_the_model() -> None:
    model = build("llama")
    before = inspect.signature(model.forward)
    assert inspect.signature(tile_model(model).forward) == before


def test_the_logits_never_exist() -> None:
    """The largest tensor of a step is smaller than half of them."""
    model = tile_model(build("llama", vocab_size=4096), num_shards=8)
    ids = torch.arange(128).reshape(2, 64) % 31
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert live.largest < 128 * 4096 * 8 / 2


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(TypeError, match=r"^tile_model: strict must be True or False, got str"):
        tile_model(build("llama"), strict="yes")  # type: ignore[arg-type]

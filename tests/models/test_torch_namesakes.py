"""Classes of somebody else's that are named like those of transformers, or of torch, and compute something else: a vendored
model, code beside a checkpoint, a patched class. What is tiled is what they compute, never the formula of the name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import UnsupportedError
from tests.models.test_torch_models import IDS, assert_same, build, loss_and_gradients
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.experts.forms import is_experts
from tiled_torch.models.mlps.tiled import activation_now, known_of

pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama as theirs

LAYER, MLP, HEAD = "model.layers.1", "model.layers.1.mlp", "lm_head"
OTHER = "tile: a probe shows another formula than that of tiled_mlp"


class LlamaMLP(theirs.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class LlamaAttention(theirs.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return 3 * y, weights


class LlamaDecoderLayer(theirs.LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 1.5 * super().forward(*args, **kwargs)


class LlamaForCausalLM(theirs.LlamaForCausalLM):
    """Divides its logits, as Granite's and MiniCPM's do."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs: Any = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state) / 4
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return theirs.CausalLMOutputWithPast(loss=loss, logits=logits)


class GELU(nn.Module):
    """GPT-2's first one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def with_class(path: str, kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).__class__ = kind

    return change


def with_activation(model: nn.Module) -> None:
    model.get_submodule(MLP).act_fn = GELU()


# A part of the model, the path in scope "mlp" and in "block" of one module, and which module.
NAMESAKES: dict[str, tuple[Callable[[Any], None], str, str, str]] = {
    "mlp": (with_class(MLP, LlamaMLP), MLP, OTHER, OTHER),
    "mlp's layer": (with_class(MLP, LlamaMLP), LAYER, "", f"mlp: mlp runs {__name__}.LlamaMLP.forward"),
    "attention": (
        with_class(f"{LAYER}.self_attn", LlamaAttention), LAYER, "",
        f"mlp: self_attn runs {__name__}.LlamaAttention.forward",
    ),
    "layer": (with_class(LAYER, LlamaDecoderLayer), MLP, "tiled_mlp", "tiled_mlp"),
    "model": (with_class("", LlamaForCausalLM), HEAD, *2 * ("tiled_linear_cross_entropy",)),
    "activation": (with_activation, MLP, *2 * (f"tile: act_fn is {__name__}.GELU",)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:tile_model. .* in spite of scope=.block.")
@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("name", NAMESAKES)
def test_a_namesake_is_computed_as_it_is(name: str, scope: Any) -> None:
    change, module, *paths = NAMESAKES[name]
    model = build("llama").train()
    change(model)
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=3, scope=scope)
    assert_same(loss_and_gradients(model), expected)
    path = paths[scope == "block"]
    if path and not (scope == "block" and name == "activation"):  # a block calls what it finds
        assert tiling_paths(model)[module] == path
    assert_same(loss_and_gradients(untile_model(model)), expected)


def test_a_class_of_transformers_that_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before tiling or between two steps, as attention of other libraries comes in."""
    model = build("llama").train()
    tile_model(model, num_shards=3, scope="block")
    loss_and_gradients(model)
    assert tiling_paths(model)[LAYER] == "tiled_block"
    own = theirs.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        y, weights = own(self, *args, **kwargs)
        return 3 * y, weights

    monkeypatch.setattr(theirs.LlamaAttention, "forward", forward)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer runs whole, .* in spite of scope='block': self_attn runs "):
        found = loss_and_gradients(model)
    assert tiling_paths(model)[LAYER].startswith(f"mlp: self_attn runs {__name__}.")
    assert_same(found, loss_and_gradients(untile_model(model)))


def test_a_layer_of_another_library_has_no_block_to_tile() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.__class__ = LlamaDecoderLayer
    with pytest.raises(
        UnsupportedError, match=r"^tile_model: model must be a decoder of a family whose blocks are known"
    ):
        tile_model(model, scope="block")
    assert model(input_ids=IDS, labels=IDS).loss is not None


def test_experts_of_another_library_are_not_those_of_the_name() -> None:
    """Which are known by their attributes where transformers declares them, and by names in one family."""
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = modeling.Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)

    class Llama4TextExperts(modeling.Llama4TextExperts):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    assert is_experts(modeling.Llama4TextExperts(config))
    assert not is_experts(Llama4TextExperts(config))


def test_an_activation_that_is_exchanged_where_weights_are_split_is_refused() -> None:
    """It was computed as silu; where nothing is split such an MLP is called."""
    mlp: Any = tile_model(build("llama")).get_submodule(MLP)
    assert activation_now(mlp, known_of(mlp)) == "silu"  # type: ignore[arg-type]
    mlp.act_fn = nn.Softplus()
    with pytest.raises(
        UnsupportedError, match=r"^tensor_parallel_mlp: the MLP must be of its formula, got act_fn is Softplus"
    ):
        activation_now(mlp, known_of(mlp))  # type: ignore[arg-type]

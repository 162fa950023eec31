"""`tile_model(scope="block")` of layers with adapters of single parameters, as peft's of experts, and of other kinds."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.models.test_torch_block import assert_equal, gradients, layer_paths
from tests.models.test_torch_block_experts import build
from tests.models.test_torch_models import Adapter, assert_same, loss_and_gradients
from tests.models.test_torch_models import build as built
from tiled_torch import tile_model, tiling_paths


class Delta(nn.Module):
    """A low-rank pair beside a weight, [experts, out, in] or [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        *experts, out, size = weight.shape
        self.a = nn.Parameter(torch.randn(*experts, 2, size, dtype=weight.dtype))
        self.b = nn.Parameter(torch.randn(*experts, out, 2, dtype=weight.dtype) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Lent(nn.Module):
    """As peft's of `target_parameters`: it parametrizes a weight of a module for the time of a call."""

    def __init__(self, base_layer: Any, name: str) -> None:
        super().__init__()
        inside = next(m for m in base_layer.modules() if not isinstance(m, Lent))
        self.base_layer, self.name = base_layer, name
        self.delta = Delta(getattr(inside, name).requires_grad_(False))
        self.__dict__["inside"] = inside

    def forward(self, *given: Any) -> Any:
        asks = getattr(self.inside, self.name).requires_grad
        parametrize.register_parametrization(self.inside, self.name, self.delta)
        self.inside.parametrizations[self.name].original.requires_grad_(asks)
        try:
            with parametrize.cached():
                return self.base_layer(*given)
        finally:
            parametrize.remove_parametrizations(self.inside, self.name, leave_parametrized=False)


def adapted(model: Any, *names: str) -> Any:
    """The model with adapters of parameters of every layer's MLP, nested where they are of one module."""
    torch.manual_seed(2)
    for layer in model.model.layers:
        for name in names:
            owner, _, own = name.rpartition(".")
            layer.mlp.set_submodule(owner, Lent(layer.mlp.get_submodule(owner), own))
    return model


def tiled(kind: str, order: str, *names: str, hook: bool = False) -> Any:
    """Adapted before or after `tile_model`; hook: one on what the experts call."""
    model = build(kind)
    if hook:
        for layer in model.model.layers:
            layer.mlp.experts.act_fn.register_forward_hook(lambda *_: None)
    if order == "tiled first":
        return adapted(tile_model(model, scope="block", num_shards=3), *names)
    return tile_model(adapted(model, *names), scope="block", num_shards=3)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("order", ["tiled first", "adapted first"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_adapters_of_experts(kind: str, order: str) -> None:
    """Every adapter's gradient, and nothing else's of the experts; these run by their formula all the same."""
    untiled, model = adapted(build(kind), *EXPERTS), tiled(kind, order, *EXPERTS)
    expected = gradients(untiled)
    assert sum("delta" in name for name in expected) == 2 * 2 * len(untiled.model.layers)
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}
    assert {path for name, path in tiling_paths(model).items() if ".experts." in name} == {"tiled_experts"}
    assert_same(loss_and_gradients(model), loss_and_gradients(untiled))


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_of_experts_under_the_models_own_checkpointing(offload: bool) -> None:
    expected = gradients(adapted(build("mixtral"), *EXPERTS))
    model = tiled("mixtral", "tiled first", *EXPERTS)
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


LENT = "untiled: its weights are parametrized for this call"


@pytest.mark.parametrize("order", ["tiled first", "adapted first"])
def test_an_adapter_of_a_router_leaves_it_whole(order: str) -> None:
    names = ("gate.weight", "experts.down_proj")
    expected = gradients(adapted(build("mixtral"), *names))
    model = tiled("mixtral", order, *names)
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}
    assert tiling_paths(model)["model.layers.0.mlp.gate.base_layer"] == LENT


@pytest.mark.filterwarnings("ignore:tile_model. .* in spite of scope=.block.")
@pytest.mark.parametrize("order", ["tiled first", "adapted first"])
def test_adapted_experts_that_have_to_be_called_run_whole(order: str) -> None:
    """Backward would call them again, without the adapter."""
    plain = build("mixtral")
    expected = gradients(adapted(plain, "experts.gate_up_proj"))
    model = tiled("mixtral", order, "experts.gate_up_proj", hook=True)
    assert_equal(gradients(model), expected)
    assert tiling_paths(model)["model.layers.0.mlp.experts.base_layer"] == f"{LENT}, and act_fn has hooks"


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "mlp.experts.gate_up_proj"])
@pytest.mark.parametrize("around", [nullcontext, parametrize.cached])
def test_parametrized_weights(around: Any, name: str) -> None:
    """What `cached` keeps of a forward without gradients is no weight of backward."""
    owner, _, own = name.rpartition(".")

    def parametrized() -> Any:
        model = build("mixtral")
        module = model.model.layers[0].get_submodule(owner)
        torch.manual_seed(2)
        parametrize.register_parametrization(module, own, Delta(getattr(module, own)))
        return model

    expected, model = gradients(parametrized()), tile_model(parametrized(), scope="block", num_shards=3)
    assert sum("parametrizations" in key for key in expected) == 3
    context: AbstractContextManager[None] = around()
    with context:
        found = gradients(model)
    assert_equal(found, expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.filterwarnings("ignore:tile_model. .* in spite of scope=.block.")
def test_cached_weights_of_a_layer_that_runs_its_mlp_alone() -> None:
    """It is a checkpoint, which has to compute again what it computed."""

    def parametrized() -> Any:
        model = built("llama").train()
        projection = model.model.layers[0].self_attn.q_proj
        torch.manual_seed(2)
        parametrize.register_parametrization(projection, "weight", Delta(projection.weight))
        projection.register_forward_hook(lambda *_: None)
        return model

    expected, model = gradients(parametrized()), tile_model(parametrized(), scope="block", num_shards=3)
    with parametrize.cached():
        assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"mlp: self_attn.q_proj has hooks", "tiled_block"}


class Drawing(Adapter):
    """With a dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.dropout(x, 0.5) @ self.a.T @ self.b.T


class DrawingNorm(nn.Module):
    """A norm, then a dropout that is no module."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(x), 0.5)


def test_what_draws_outside_of_the_known_projections_draws_the_same_again() -> None:
    """In a shared expert beside a mixture, in a norm. One shard draws what the untiled layer draws."""

    def drawing() -> list[Any]:
        torch.manual_seed(3)
        mixture, dense = build("qwen2_moe"), built("llama").train()
        shared = mixture.model.layers[0].mlp.shared_expert
        shared.up_proj = Drawing(shared.up_proj)
        layer = dense.model.layers[0]
        layer.post_attention_layernorm = DrawingNorm(layer.post_attention_layernorm)
        return [mixture, dense]

    for untiled, model in zip(drawing(), drawing(), strict=True):
        expected = gradients(untiled)
        assert_equal(gradients(tile_model(model, scope="block", num_shards=1)), expected)
        assert layer_paths(model) == {"tiled_block"}

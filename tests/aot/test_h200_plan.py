"""`plan` beside the JAX half's own step, whole models of eight billion parameters compiled for one H200 to sixty-four."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.app.plan.decoder import MODELS, Decoder
from shared_specs.app.plan.record import RECORDED_GPUS, RECORDED_MODELS, RECORDED_TOKENS, recorded_setting
from shared_specs.app.plan.simulated import predicted_device, simulated_step
from shared_specs.app.plan.step import Setting, parts_of
from shared_specs.tolerances import PLAN_BYTES, PLAN_COMPILED
from tests.models.jax_adapters import ATTENTION, MLP, adapt
from tiled_jax.commands.plan import simulate
from tiled_jax.commands.plan.simulate import SIMULATOR
from tiled_jax.plan.sizes import decoder_of_model


def assert_predicted(model: str, setting: Setting, decoder: Decoder | None = None) -> None:
    decoder = decoder or MODELS[model]
    found, predicted = (
        simulated_step(decoder, setting, SIMULATOR),
        predicted_device(decoder, SIMULATOR.setting_simulated(setting)),
    )
    print(f"{predicted / found.device:.3f}", found, parts_of(decoder, setting).by_name)
    assert predicted == pytest.approx(found.device, rel=PLAN_COMPILED)
    assert parts_of(decoder, setting).host == pytest.approx(found.host, rel=PLAN_BYTES)
    assert ("collective-permute" in found.collectives) == (setting.ring > 1)


@pytest.mark.parametrize("tokens", RECORDED_TOKENS)
@pytest.mark.parametrize("gpus", RECORDED_GPUS)
@pytest.mark.parametrize("model", RECORDED_MODELS)
def test_exchanged_heads(model: str, gpus: int, tokens: int) -> None:
    assert_predicted(model, recorded_setting(tokens, gpus, "jax"))


RING: dict[str, Any] = {"context_kind": "ring"}
# Model, tokens, GPUs, what is set beside: places of two ranks and of more, key heads for each and fewer, float32, inputs kept.
RINGS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("llama-3-8b", 2**17, 8, RING),
    ("llama-3-8b", 2**19, 8, RING | {"context": 4}),
    ("llama-3-8b", 2**20, 32, RING),
    ("qwen3-8b", 2**20, 8, RING),
    ("qwen3-8b", 2**19, 8, RING | {"dtype": "float32"}),
    ("qwen3-8b", 2**18, 8, RING | {"offload": False}),
    ("llama-2-7b", 2**19, 8, RING),
    ("llama-2-7b", 2**17, 8, RING | {"context": 2}),
    ("llama-3-8b", 2**21, 64, {"context_kind": "2d", "inside": 32}),
    ("qwen3-8b", 2**20, 8, {"context_kind": "2d", "inside": 4}),
    ("qwen2.5-7b", 2**20, 8, {"context_kind": "2d", "inside": 4}),
    ("qwen2.5-0.5b", 2**19, 8, {"context_kind": "2d", "inside": 2}),
]


@pytest.mark.parametrize(("model", "tokens", "gpus", "more"), RINGS)
def test_rings(model: str, tokens: int, gpus: int, more: dict[str, Any]) -> None:
    assert_predicted(model, replace(recorded_setting(tokens, gpus, "jax"), **more))


# Places of rings and of exchanged heads beside the ranks that split layers; float32, inputs kept, a loss that is the peak, in
# shards that must not run side by side.
SPLIT: list[tuple[str, int, int, dict[str, Any]]] = [
    ("qwen3-8b", 2**20, 8, {"context": 1, "tensor": 8}),
    ("llama-3-8b", 2**19, 8, {"context": 4, "tensor": 2}),
    ("qwen2.5-0.5b", 2**17, 8, RING | {"context": 4, "tensor": 2}),
    ("qwen3-8b", 2**15, 8, {"context": 1, "tensor": 4, "offload": False}),
    ("llama-3-8b", 2**19, 8, RING | {"context": 4, "tensor": 2, "dtype": "float32"}),
    ("qwen3-8b", 2**20, 8, {"context": 4, "tensor": 2, "context_kind": "2d", "inside": 2}),
    ("qwen3-8b", 2**20, 32, {"context": 4, "tensor": 8}),
    ("llama-3-70b", 2**19, 32, {"context": 4, "tensor": 8}),
]


@pytest.mark.parametrize(("model", "tokens", "gpus", "more"), SPLIT)
def test_split_layers(model: str, tokens: int, gpus: int, more: dict[str, Any]) -> None:
    assert_predicted(model, replace(recorded_setting(tokens, gpus, "jax"), **more))


# Fused projections, layers without positions, norms behind branches: of layers that all ranks have whole.
FAMILIES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("phi-4", 2**20, 8, {}),
    ("phi-4", 2**18, 8, {"offload": False}),
    ("smollm3-3b", 2**19, 8, {}),
    ("smollm3-3b", 2**17, 1, {}),
    ("smollm3-3b", 2**19, 8, RING),
    ("gemma-3-1b", 2**20, 8, {"context": 4}),
    ("gemma-3-1b", 2**18, 8, {"context": 4, "offload": False}),
    ("gemma-3-1b", 2**16, 8, {"context": 1}),
]


# Experts, of which every device computes all: many and few, float32, inputs kept, places of a ring.
EXPERTS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("mixtral-8x7b", 2**20, 8, {}),
    ("mixtral-8x7b", 2**17, 8, {"context": 1}),
    ("mixtral-8x7b", 2**20, 8, {"dtype": "float32"}),
    ("qwen3-30b-a3b", 2**20, 8, {}),
    ("qwen3-30b-a3b", 2**18, 8, {"offload": False}),
    ("qwen3-30b-a3b", 2**19, 8, RING),
    ("qwen3-30b-a3b", 2**17, 32, {"context": 4}),
]


@pytest.mark.parametrize(("model", "tokens", "gpus", "more"), EXPERTS)
def test_experts(model: str, tokens: int, gpus: int, more: dict[str, Any]) -> None:
    assert_predicted(model, replace(recorded_setting(tokens, gpus, "jax"), **more))


# Adapters around projections of a frozen base: of all, of two. The peak is a layer, or the loss without its head's gradient.
ADAPTERS: list[tuple[str, int, int, dict[str, Any], tuple[str, ...]]] = [
    ("llama-3-8b", 2**20, 8, {}, ATTENTION + MLP),
    ("llama-3-8b", 2**17, 8, {"context": 1}, ATTENTION + MLP),
    ("llama-3-8b", 2**16, 1, {}, ATTENTION + MLP),
    ("qwen3-8b", 2**17, 8, {}, ATTENTION + MLP),
    ("qwen3-8b", 2**18, 8, {"offload": False}, ATTENTION + MLP),
    ("qwen3-8b", 2**20, 8, {}, ("q", "v")),
    ("qwen3-8b", 2**19, 8, RING, ATTENTION + MLP),
]


@pytest.mark.parametrize(("model", "tokens", "gpus", "more", "names"), ADAPTERS)
def test_adapters(
    model: str, tokens: int, gpus: int, more: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs alone are trained."""
    plain = simulate.model_of

    def adapted(decoder: Decoder, setting: Setting) -> Any:
        found = plain(decoder, setting)
        adapt(found.layers, names, jnp.dtype(setting.dtype))
        return found

    monkeypatch.setattr(simulate, "model_of", adapted)
    monkeypatch.setattr(simulate, "parallelize", partial(simulate.parallelize, wrt=nnx.LoRAParam))
    setting = replace(recorded_setting(tokens, gpus, "jax"), **more)
    shapes = nnx.eval_shape(lambda: adapted(MODELS[model], setting))
    assert_predicted(model, setting, decoder_of_model("plan", shapes, nnx.LoRAParam))


@pytest.mark.parametrize(("model", "tokens", "gpus", "more"), FAMILIES)
def test_other_families(model: str, tokens: int, gpus: int, more: dict[str, Any]) -> None:
    assert_predicted(model, replace(recorded_setting(tokens, gpus, "jax"), **more))

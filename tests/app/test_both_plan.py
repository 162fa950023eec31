"""`plan` and `fits` of model objects in both halves: errors, the command's numbers, frozen parameters, the summary."""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.options import InputError
from shared_specs.app.plan.decoder import FAMILIES, Decoder, check_planned, decoder_of
from shared_specs.app.plan.function.bad_inputs import BAD_PLANS, BadPlan
from shared_specs.app.plan.search import memory_of, plan
from shared_specs.app.plan.step import MOMENTS, Setting, parts_of
from shared_specs.config import HALVES, Half
from shared_specs.errors import UnsupportedError

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp = pytest.importorskip("jax.numpy")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
TOKENS = 2**17


def decoder(kind: str = "llama", **more: Any) -> Decoder:
    return decoder_of(SIZES | {"model_type": kind} | more, "")


def model_of(half: Half, kind: str = "llama", **more: Any) -> Any:
    """A model of shapes alone: on the meta device, or abstract."""
    if half == "torch":
        config = transformers.AutoConfig.for_model(kind, **SIZES, pad_token_id=None, **more)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    from tiled_jax.models import Llama, LlamaConfig

    config = LlamaConfig.from_hf(SIZES | {"model_type": kind} | more)
    return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))


def functions(half: Half) -> dict[str, Any]:
    package = import_module(f"tiled_{half}")
    return {"plan": package.plan, "fits": package.fits}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {half: model_of(half) for half in HALVES}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", BAD_PLANS, ids=lambda case: case.id)
def test_a_bad_input_is_one_sentence(half: Half, case: BadPlan, models: dict[str, Any]) -> None:
    """The same one in both halves, with the name of the function that was called."""
    for name, function in functions(half).items():
        with pytest.raises(case.error) as caught:
            function(**{"model": models[half], "tokens": 4096} | case.arguments)
        assert str(caught.value) == f"{name}: {case.message}"


@pytest.mark.parametrize("half", HALVES)
def test_models_that_have_no_formulas(half: Half) -> None:
    """Any module is a model, whose own step is measured, and a function is none."""
    bare = torch.nn.functional.silu if half == "torch" else nnx.silu
    with pytest.raises(TypeError, match=r"^plan: model must be a module, got \w*[fF]unction\."):
        functions(half)["plan"](bare, 4096)
    sizes = {"torch": lambda: torch.nn.Linear(2, 2), "jax": lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
    ends: Any = {"loss_fn": lambda model, batch: model(batch[..., None].astype(jnp.float32) * jnp.ones(2)).sum()}
    if half == "torch":
        ends = {"loss_fn": lambda model, batch: model(batch[..., None].float().expand(-1, -1, 2)).sum()}
    found = functions(half)["plan"](sizes[half](), 4096, dtype="float32", **ends)
    assert found.fits
    assert found.plan.decoder.whole is not None
    assert found.plan.decoder.parameters == 6


def test_caps_of_which_only_jax_has_formulas() -> None:
    """Of attention and logits: PyTorch measures such a model."""
    no_caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    check_planned(decoder("gemma2", **no_caps), "torch", 1)
    check_planned(decoder("gemma2"), "jax", 1)
    for gone in no_caps:
        kept = next(cap for cap in no_caps if cap != gone)
        with pytest.raises(InputError, match=f"^plan: --model must have no {kept} in PyTorch"):
            check_planned(decoder("gemma2", **{gone: None}), "torch", 1)


@pytest.mark.parametrize(
    ("half", "kind"), [(half, kind) for half in HALVES for kind in FAMILIES if (half, kind) != ("torch", "gemma2")]
)
def test_a_model_in_float32_has_the_plan_of_its_config(half: Half, kind: str) -> None:
    """All of it trained: what is set, bytes, time and reach are those of the command."""
    more: dict[str, Any] = {"tie_word_embeddings": kind == "qwen3", "attention_bias": kind == "llama"}
    sizes = decoder(kind, **more)
    memory, gpu = memory_of("24GB", "")
    wanted = plan(sizes, TOKENS, memory=memory, gpus=2, gpu=gpu, half=half)
    found = functions(half)["plan"](model_of(half, kind, **more), TOKENS, devices=2, device_memory="24GB").plan
    assert replace(found.decoder, held=None, kind=kind) == sizes  # what a Mistral has beside Llama is its window
    assert found.decoder.held.count == sizes.parameters
    assert (found.setting, found.parts, found.reach) == (wanted.setting, wanted.parts, wanted.reach)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_returned(half: Half, models: dict[str, Any]) -> None:
    """Whether it fits, settings, bytes, the longest context and a time; as text all of them."""
    found = functions(half)["plan"](models[half], TOKENS, devices=8, device_memory="h100")
    assert found.fits
    assert found.fits == functions(half)["fits"](models[half], TOKENS, devices=8, device_memory="h100")
    assert list(found.what_to_set)[:2] == ["mesh", "tile_model" if half == "torch" else "models.Llama"]
    assert found.bytes["total"] == found.plan.parts.total == sum(found.plan.parts.by_name.values())
    assert found.longest == found.plan.reach[-1].tokens > TOKENS
    assert found.seconds > 0
    for said in (
        f"{TOKENS} tokens on 8 x 74.5 GiB: fits",
        "total",
        "at least",
        f"{found.longest} tokens",
        "are trained",
    ):
        assert said in str(found)


@pytest.mark.parametrize("half", HALVES)
def test_what_does_not_fit(half: Half, models: dict[str, Any]) -> None:
    """Nothing is set, and the text says so."""
    few = {"device_memory": 2**32, "host_memory": "1GiB"}
    assert not functions(half)["fits"](models[half], 2**26, **few)
    found = functions(half)["plan"](models[half], 2**26, **few)
    assert (found.fits, found.what_to_set, found.bytes, found.seconds) == (False, {}, {}, None)
    assert "does not fit with any setting" in str(found)


def frozen(half: Half) -> tuple[Any, int, dict[str, Any]]:
    """A model of which only norms are trained, how many parameters these are, and what `plan` has to be told."""
    model = model_of(half)
    trained = 3 * 2 * 64 + 64
    if half == "jax":
        return model, trained, {"wrt": nnx.All(nnx.Param, nnx.PathContains("scale"))}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model, trained, {}


@pytest.mark.parametrize("half", HALVES)
def test_a_frozen_base_costs_its_weights(half: Half) -> None:
    """No gradient, no moments, no float32 sums and no gradient of the head, counted by hand; and less time."""
    model, trained, told = frozen(half)
    found = functions(half)["plan"](model, TOKENS, devices=2, device_memory="h100", **told).plan
    sizes = found.decoder
    assert (sizes.held.trained, sizes.layer_trained, sizes.mlp_trained, sizes.head_trained) == (trained, 128, 0, 0)
    whole = replace(sizes, held=None)
    for scope in ("block", "mlp", "none")[: 3 if half == "torch" else 1]:
        setting = Setting(tokens=4096, gpus=2, half=half, scope=scope, dtype="bfloat16")
        mine, all_of = parts_of(sizes, setting), parts_of(whole, setting)
        assert mine.weights == all_of.weights == 4 * whole.parameters // 2
        assert mine.optimizer == MOMENTS["adamw"] * 4 * trained // 2
        assert mine.gradients <= 4 * trained // 2
        assert mine.total < all_of.total
    split = Setting(tokens=4096, gpus=2, tensor=2, half=half)
    assert parts_of(sizes, split).total < parts_of(whole, split).total
    seconds = functions(half)["plan"](model_of(half), TOKENS, devices=2, device_memory="h100").seconds
    assert found.seconds < seconds


def test_a_parameter_counts_in_its_own_dtype() -> None:
    """A base in 16 bits takes half the weights, and moments are those of what is trained, in its dtype."""
    model = model_of("torch").to(torch.bfloat16)
    found = functions("torch")["plan"](model, 4096).plan
    assert (found.decoder.weight_bytes, found.decoder.trained_bytes) == (2 * found.decoder.parameters,) * 2


def test_a_parameter_that_zero_3_keeps_in_parts_counts_whole() -> None:
    """Between its uses DeepSpeed leaves it without elements, with its shape beside it."""
    model = model_of("torch")
    head = model.lm_head.weight
    head.ds_id, head.ds_shape = 0, head.shape
    head.data = torch.empty(0, device="meta")
    found = functions("torch")["plan"](model, 4096).plan.decoder
    assert found.held.count == found.parameters


class Adapter(torch.nn.Module):
    """As peft's: the layer that it is around, and two small ones beside it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, 4, bias=False, device="meta")
        self.lora_B = torch.nn.Linear(4, base.out_features, bias=False, device="meta")


class Wrapped(torch.nn.Module):
    """As peft's model: around another, whose config it has."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config


def test_adapters_in_pytorch() -> None:
    """Theirs alone are trained, layers are not split, and a bfloat16 base with them takes a fraction of full training."""
    model = model_of("torch").to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = Adapter(layer.self_attn.q_proj), Adapter(layer.mlp.up_proj)
    found = functions("torch")["plan"](Wrapped(model), TOKENS, devices=8).plan
    held = found.decoder.held
    of_q, of_up = 4 * (64 + 64), 4 * (64 + 96)
    assert (held.trained, held.layer_trained, held.mlp_trained) == (3 * (of_q + of_up), of_q + of_up, of_up)
    assert held.bytes == 2 * found.decoder.parameters + 4 * held.trained
    assert held.trained_bytes == 4 * held.trained
    assert (found.decoder.adapted, found.decoder.mlp_adapted, held.trains_head) == (True, True, False)
    assert {reach.setting.tensor for reach in found.reach} == {1}


def test_adapters_in_jax() -> None:
    """Theirs alone are trained, and layers are not split."""
    found = functions("jax")["plan"](with_lora(), TOKENS, devices=8).plan
    held, of_q = found.decoder.held, 4 * (64 + 64)
    assert (held.trained, held.layer_trained, held.mlp_trained) == (3 * of_q, of_q, 0)
    assert held.bytes == 4 * (found.decoder.parameters + held.trained)
    assert held.trained_bytes == 4 * held.trained
    assert (found.decoder.adapted, found.decoder.mlp_adapted, held.trains_head) == (True, False, False)
    assert {reach.setting.tensor for reach in found.reach} == {1}


def test_adapters_with_which_no_layer_is_a_block_are_refused() -> None:
    """Of blocks there are formulas; `parallelize` says the same."""
    with pytest.raises(
        UnsupportedError,
        match=r"^plan: a layer's parts must be plain in JAX, got attention\.q has an adapter with dtype=.*\. There are",
    ):
        functions("jax")["plan"](with_lora("bfloat16"), 4096)
    with pytest.raises(TypeError, match=r"^plan: wrt must be a filter of nnx or None, got int\."):
        functions("jax")["plan"](model_of("jax"), 4096, wrt=3)


def with_lora(dtype: str | None = None) -> Any:
    from tiled_jax.models import Llama, LlamaConfig

    def made() -> Any:
        model = Llama(LlamaConfig.from_hf(SIZES), rngs=nnx.Rngs(0))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0, 0), out_axes=0)
        def adapted(layer: Any, rngs: Any) -> Any:
            q = layer.attention.q
            layer.attention.q = nnx.LoRA(q.in_features, 4, q.out_features, base_module=q, dtype=dtype, rngs=rngs)
            return layer

        model.layers = adapted(model.layers, nnx.Rngs(1))
        return model

    return nnx.eval_shape(made)


def test_an_adapter_of_the_head_in_jax() -> None:
    """Is what is trained where there is one, and the head has no gradient."""

    def made() -> Any:
        from tiled_jax.models import Llama, LlamaConfig

        model = Llama(LlamaConfig.from_hf(SIZES), rngs=nnx.Rngs(0))
        model.head = nnx.LoRA(64, 4, 512, base_module=model.head, rngs=nnx.Rngs(1))
        return model

    found = functions("jax")["plan"](nnx.eval_shape(made), 4096).plan.decoder
    assert (found.held.trained, found.layer_trained, found.head_trained) == (4 * (64 + 512), 0, 0)


def test_a_half_is_imported_without_the_planner() -> None:
    """`import tiled_torch` and `tiled_jax` bring no framework and nothing of the commands; the planner needs numpy alone."""
    script = """
import sys
import tiled_jax, tiled_torch
assert not {"torch", "jax", "flax", "shared_specs.app"} & set(sys.modules)
import shared_specs.app.plan.function.checks
assert not {"rich", "typer", "gguf", "safetensors", "tokenizers", "matplotlib"} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

"""`plan` of nnx models that no formula knows: their own step is compiled at a few lengths, and XLA's bytes count."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.app.plan.function.measured import FEWEST
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.errors import SpecError
from shared_specs.tolerances import COST_BYTES
from tiled_jax import fits, plan, tile_model, tiled_model_loss
from tiled_jax.models import Llama, LlamaConfig
from tiled_jax.plan.measured import MOST
from tiled_jax.plan.sizes import decoder_of_model
from tiled_jax.plans.api import parallelize

HIDDEN, INSIDE, VOCAB = 64, 192, 512


class Layer(nnx.Module):
    """Attention over blocks of as many tokens, or over all pairs, and an MLP."""

    def __init__(self, rngs: nnx.Rngs, block: int | None) -> None:
        self.qkv, self.out = (nnx.Linear(HIDDEN, n * HIDDEN, use_bias=False, rngs=rngs) for n in (3, 1))
        up, down = nnx.Linear(HIDDEN, INSIDE, rngs=rngs), nnx.Linear(INSIDE, HIDDEN, rngs=rngs)
        self.mlp = nnx.Sequential(up, nnx.gelu, down)
        self.norm, self.block = nnx.RMSNorm(HIDDEN, rngs=rngs), block

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, _ = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(-1, self.block or tokens, 2, 3 * HIDDEN // 2), 3, axis=-1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.reshape(batch, tokens, HIDDEN))
        return x + self.mlp(x)


class Decoder(nnx.Module):
    """A decoder as its users write one: layers in a list."""

    def __init__(self, layers: int = 2, block: int | None = 128, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, block) for _ in range(layers)])
        self.head = nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(block: int | None = 128) -> Any:
    return nnx.eval_shape(lambda: Decoder(block=block, rngs=nnx.Rngs(0)))


def compiled(model: Any, setting: Setting, **options: Any) -> int:
    """The bytes of the gradients' own program, by XLA."""
    mesh = jax.make_mesh((setting.gpus,), ("dp_shard",), devices=jax.devices()[: setting.gpus])
    options = {"loss_fn": lambda model, ids: tiled_model_loss(model, ids[:, 1:], ids[:, :-1])} | options
    made = parallelize(model, mesh, setting.config, **options)
    tokens = jax.ShapeDtypeStruct((setting.sequences * setting.gpus, setting.tokens + 1), jnp.int32)
    found = made.gradients.lower(made.shapes.parameters, tokens).compile().memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


ALONE = Setting(tokens=3 * FEWEST, gpus=1, half="jax", dtype="float32", device="cpu", optimizer="sgd")
FLOAT32: Any = {"dtype": "float32"}


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(("tokens", "block"), [(3 * FEWEST, 128), (2 * MOST, None), (2 * MOST, 128)])
def test_bytes_of_lengths_that_are_not_compiled(tokens: int, block: int | None, gpus: int) -> None:
    """Between those that are, and beyond, with attention over all pairs too; of eight devices what one of them holds."""
    setting = replace(ALONE, tokens=tokens, gpus=gpus)
    found = parts_of(decoder_of_model("plan", decoder(block), None), setting)
    assert found.program > 0
    assert found.total - RESERVE == pytest.approx(compiled(decoder(block), setting), rel=COST_BYTES)


def test_a_plan_of_such_a_model() -> None:
    """Of the tokens that are asked for the bytes are XLA's own."""
    model = Decoder(rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    found = plan(model, 2944, device_memory="24GB", optimizer="sgd", sequences=2, **FLOAT32)
    assert found.bytes["total"] - RESERVE == compiled(decoder(), replace(ALONE, tokens=2944, sequences=2))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.to_pure_dict(nnx.state(model))))
    assert found.fits
    assert found.seconds is None
    assert found.what_to_set == {
        "mesh": "1 x 1 x 1: data and fully sharded x context x tensor",
        "Checkpointing": 'mode="full", offload=False',
    }
    assert [reach.lever for reach in found.plan.reach] == ["the model as it is"]
    assert found.longest > 2 * MOST
    assert "without values at a few lengths" in str(found)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert f"{count} parameters, of which {count} are trained" in str(found)
    assert not fits(model, found.longest + 2**16, device_memory="24GB", optimizer="sgd", sequences=2, **FLOAT32)


def test_moments_and_tiling_count() -> None:
    """The model is planned as it is: tiled, its MLPs take less; AdamW keeps two numbers of every trained one."""
    model = nnx.eval_shape(lambda: Decoder(layers=1, rngs=nnx.Rngs(0)))
    whole = plan(model, 4096, **FLOAT32).bytes
    assert whole["optimizer"] == 2 * whole["gradients"] == 2 * whole["weights"]
    assert plan(tile_model(model, num_shards=16), 4096, **FLOAT32).bytes["program"] < whole["program"]


def test_what_is_trained_and_another_loss() -> None:
    model = decoder()
    for layer in model.layers:
        layer.out = nnx.eval_shape(
            lambda: nnx.LoRA(
                HIDDEN, 4, HIDDEN, base_module=nnx.Linear(HIDDEN, HIDDEN, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
            )
        )
    calls = []

    def squares(model: Any, tokens: jax.Array) -> jax.Array:
        calls.append(tokens.shape)
        return jnp.mean(model(tokens[:, :-1]) ** 2)

    whole, adapters = (plan(model, 512, wrt=wrt, loss_fn=squares, **FLOAT32) for wrt in (nnx.Param, None))
    assert {shape[1] for shape in calls} >= {513}
    assert adapters.plan.decoder.held is not None
    assert adapters.plan.decoder.held.trained == 2 * 2 * 4 * HIDDEN
    assert adapters.bytes["total"] < whole.bytes["total"]


def test_a_llama_with_a_loss_of_its_own_is_measured() -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    config = LlamaConfig.from_hf(sizes | {"num_key_value_heads": 4})
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    found = plan(model, 256, loss_fn=lambda model, ids: jnp.mean(model(ids) ** 2), **FLOAT32)
    assert found.plan.decoder.whole is not None
    assert plan(model, 256).plan.decoder.whole is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "16 bits": (
        {"dtype": "bfloat16"},
        r"^plan: dtype must be float32 without GPUs, got bfloat16\. JAX's CUDA plugin compiles for GPUs that are not .*\.$",
    ),
    "devices": (
        {"devices": 1024},
        r"^plan: devices must be at most \d+, for which .* can be compiled here, got 1024\. JAX's CUDA plugin .*\.$",
    ),
    "no logits": (
        {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},
        r"^plan: model must have a loss of 1 x 64 tokens: .*",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compiled_is_said(case: str) -> None:
    arguments, said = BAD[case]
    with pytest.raises(SpecError, match=said):
        plan(**{"model": decoder(), "tokens": 64, "dtype": "float32"} | arguments)


def test_a_loss_that_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"^plan: loss_fn must be a function or None, got str\.$"):
        plan(decoder(), 64, loss_fn="mean")

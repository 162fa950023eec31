"""Layers of scope="block" whose parts were exchanged compute with what they hold, and say that only their MLP is tiled.

A block computes the formulas of its parts and never calls them: an adapter, a norm's epsilon, a dot_general had no effect.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import llama_config, mesh_of
from tiled_jax import tiling_paths
from tiled_jax.models import Llama
from tiled_jax.parallel import parallelize

TOKENS = jnp.arange(24).reshape(1, 24)
LAYERS = 2


def stacked(make: Callable[[nnx.Rngs], Any]) -> Any:
    """A part of every layer, as the layers are stacked."""
    return nnx.split_rngs(splits=LAYERS)(nnx.vmap(make, in_axes=0, out_axes=0))(nnx.Rngs(1))


class ScaledLinear(nnx.LoRALinear):
    """An adapter with a scale, which Flax's have not."""

    def __call__(self, x: Any, **options: Any) -> jax.Array:
        return nnx.Linear.__call__(self, x, **options) + 8.0 * self.lora(x)


def adapter(model: Any) -> None:
    plain = model.layers.attention.q
    sizes = plain.in_features, plain.out_features
    made = stacked(lambda rngs: ScaledLinear(*sizes, lora_rank=4, use_bias=False, rngs=rngs))
    made.kernel = plain.kernel
    made.lora.lora_b[...] = jnp.asarray(np.random.default_rng(0).standard_normal(made.lora.lora_b.shape), jnp.float32)
    model.layers.attention.q = made


def epsilon(model: Any) -> None:
    model.layers.mlp_norm.epsilon = 0.5


def halved(*args: Any, **options: Any) -> jax.Array:
    return jax.lax.dot_general(*args, **options) * 0.5


def own_product(model: Any) -> None:
    model.layers.attention.o.dot_general = halved


def other_norm(model: Any) -> None:
    features = model.config.hidden_size
    model.layers.attention_norm = stacked(lambda rngs: nnx.LayerNorm(features, rngs=rngs))


class Doubled(nnx.Linear):
    """A subclass with a call of its own."""

    def __call__(self, inputs: Any, **options: Any) -> jax.Array:
        return 2.0 * super().__call__(inputs, **options)


def subclass(model: Any) -> None:
    model.layers.attention.v.__class__ = Doubled


def own_dtype(model: Any) -> None:
    model.layers.attention.o.dtype = jnp.dtype(jnp.bfloat16)


# What is exchanged -> the reason that is given.
EXCHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "adapter": (adapter, "attention.q is ScaledLinear"),
    "epsilon": (epsilon, "mlp_norm has epsilon=0.5"),
    "dot_general": (own_product, "attention.o has a dot_general of its own"),
    "norm": (other_norm, "attention_norm is LayerNorm"),
    "subclass": (subclass, "attention.v is Doubled"),
}


def model_with(change: Callable[[Any], None], scope: str) -> Any:
    model = Llama(llama_config(num_hidden_layers=LAYERS), scope=scope, rngs=nnx.Rngs(0))
    change(model)
    return model


def loss_and_gradients(model: Any) -> tuple[Any, Any]:
    return nnx.value_and_grad(lambda model: model(TOKENS, labels=TOKENS))(model)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("name", EXCHANGED)
def test_what_was_exchanged_takes_part_and_is_told(name: str) -> None:
    change, reason = EXCHANGED[name]
    loss, gradients = loss_and_gradients(model_with(change, "mlp"))
    model = model_with(change, "block")
    assert tiling_paths(model) == {"layers": f"mlp: {reason}", "layers.mlp": "tiled_mlp"}
    with pytest.warns(UserWarning, match=r"^Llama: scope='block' tiles the MLP of a layer alone where " + reason):
        found, own = loss_and_gradients(model)
    plain, _ = loss_and_gradients(model_with(lambda _: None, "mlp"))
    assert abs(float(plain) - float(loss)) > 100 * between("float32") * float(loss)  # it has an effect
    for a, b in zip(jax.tree.leaves((found, own)), jax.tree.leaves((loss, gradients)), strict=True):
        assert_within(np.asarray(a), np.asarray(b), between("float32"), name)


def test_a_projection_rounds_to_a_dtype_of_its_own() -> None:
    """A block computes all products in the MLP's."""
    loss, _ = loss_and_gradients(model_with(own_dtype, "mlp"))
    model = model_with(own_dtype, "block")
    assert tiling_paths(model)["layers"].startswith("mlp: attention.o has dtype=")
    with pytest.warns(UserWarning, match="attention.o has dtype=.*bfloat16"):
        found, _ = loss_and_gradients(model)
    plain, _ = loss_and_gradients(model_with(lambda _: None, "mlp"))
    effect = abs(float(plain) - float(loss))
    assert abs(float(found) - float(loss)) < effect / 100


def mlp_adapter(model: Any) -> None:
    mlp, sizes = model.layers.mlp, (model.config.hidden_size, model.config.intermediate_size)
    made = stacked(lambda rngs: nnx.LoRALinear(*sizes, lora_rank=4, use_bias=False, rngs=rngs))
    made.kernel = mlp.w_up
    del mlp.w_up
    mlp.up = made


def test_an_mlp_that_is_not_computed_by_its_formula_is_told() -> None:
    model, text = model_with(mlp_adapter, "mlp"), "Llama: TiledMLP runs through tile, which recomputes all of it: "
    assert tiling_paths(model) == {"layers.mlp": "tile: up is LoRALinear"}
    with pytest.warns(UserWarning, match=text + "up is LoRALinear") as told:
        loss_and_gradients(model)
    assert len(told) == 1


def test_plain_layers_run_as_blocks() -> None:
    assert tiling_paths(model_with(lambda _: None, "block")) == {"layers": "tiled_block"}
    assert tiling_paths(model_with(lambda _: None, "mlp")) == {"layers.mlp": "tiled_mlp"}


def test_over_devices_they_are_refused_by_name() -> None:
    config = ParallelConfig(data=DataParallel())
    with pytest.raises(
        UnsupportedError, match=r"a layer's parts must be plain with scope='block', got attention\.q is ScaledLinear"
    ):
        parallelize(model_with(adapter, "block"), mesh_of(dp_shard=2), config)

"""Modules of Flax compute with what they hold: variables of any type and plain arrays; what is neither is refused by name.

Flax freezes by the type of a variable, and `nnx.as_pure` leaves arrays: a weight that was no nnx.Param was left out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tiled_jax
from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tiled_jax import TiledLinearCrossEntropy, TiledMLP, linen
from tiled_jax.models import Llama, LlamaConfig
from tiled_jax.parallel import TensorParallelTiledMLP, parallelize
from tiled_jax.tile.api import tile

H, I, V = 16, 24, 40  # noqa: E741


class Frozen(nnx.Variable):
    """What a user freezes a parameter with."""


def x(*dims: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((*dims, H)), jnp.float32)


def near(found: jax.Array, expected: jax.Array) -> None:
    assert_within(np.asarray(found), np.asarray(expected), limit(0.0, "float32"), "the values")


def randomised(module: Any) -> Any:
    """The module with values in its biases too."""
    rng = np.random.default_rng(1)
    for name in [name for name, value in vars(module).items() if isinstance(value, nnx.Param) and name[:2] == "b_"]:
        old = getattr(module, name)
        setattr(module, name, nnx.Param(jnp.asarray(rng.standard_normal(old.shape), old.dtype)))
    return module


FORMS: dict[str, dict[str, Any]] = {"gated": {}, "plain": {"gated": False}, "fused": {"fused_gate_up": True}}
NAMES = [
    (form, f"{kind}_{name}")
    for form, names in (("gated", ("gate", "up", "down")), ("plain", ("up", "down")), ("fused", ("gate_up", "down")))
    for name in names
    for kind in "wb"
]


def mlp(form: str) -> Any:
    return randomised(TiledMLP(H, I, bias=True, num_shards=2, **FORMS[form], rngs=nnx.Rngs(0)))


@pytest.mark.deep_but(7)
@pytest.mark.parametrize(("form", "name"), NAMES)
def test_a_frozen_parameter_of_an_mlp_takes_part(form: str, name: str) -> None:
    module = mlp(form)
    expected, plain = module(x(6)), nnx.grad(lambda module: jnp.sum(module(x(6)) ** 2))(module)
    setattr(module, name, Frozen(getattr(module, name)[...]))
    np.testing.assert_array_equal(module(x(6)), expected)
    found = nnx.grad(lambda module: jnp.sum(module(x(6)) ** 2))(module)
    assert set(found) == set(plain) - {name}
    for key in found:
        near(found[key][...], plain[key][...])


@pytest.mark.parametrize("form", FORMS)
def test_a_module_of_plain_arrays(form: str) -> None:
    module = mlp(form)
    np.testing.assert_array_equal(nnx.as_pure(module)(x(6)), module(x(6)))


@pytest.mark.parametrize("value", ["a string", None, 3.0], ids=str)
def test_what_is_no_variable_is_refused_by_name(value: Any) -> None:
    module = mlp("gated")
    module.w_gate = nnx.data(value) if value == "a string" else value
    with pytest.raises(TypeError, match=r"^TiledMLP: w_gate must be a variable of Flax or an array, got"):
        module(x(6))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_frozen_parameter_of_a_head(name: str) -> None:
    head: Any = TiledLinearCrossEntropy(H, V, bias=True, num_shards=2, rngs=nnx.Rngs(0))
    head.bias = nnx.Param(jnp.linspace(-1.0, 1.0, V))
    targets = jnp.arange(6)
    expected = head(x(6), targets)
    setattr(head, name, Frozen(getattr(head, name)[...]))
    np.testing.assert_array_equal(head(x(6), targets), expected)
    np.testing.assert_array_equal(nnx.as_pure(head)(x(6), targets), expected)


@pytest.mark.deep
def test_a_frozen_parameter_over_tensor_ranks() -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    module: Any = TensorParallelTiledMLP(H, I, bias=True, num_shards=2, mesh=mesh, rngs=nnx.Rngs(0))
    expected = module(x(6))
    for name in ("w_gate", "w_down", "b_up"):
        setattr(module, name, Frozen(getattr(module, name)[...]))
    np.testing.assert_array_equal(module(x(6)), expected)


CONFIG = LlamaConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": I,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
)


@pytest.mark.deep
@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("name", ["w_gate", "w_down"])
def test_a_frozen_parameter_of_a_model(scope: str, name: str) -> None:
    model: Any = Llama(CONFIG, scope=scope, rngs=nnx.Rngs(0))
    tokens = jnp.arange(12).reshape(1, 12)

    def loss(model: Any) -> jax.Array:
        return model(tokens, labels=tokens)

    expected, plain = nnx.value_and_grad(loss)(model)
    setattr(model.layers.mlp, name, Frozen(getattr(model.layers.mlp, name)[...]))
    found, gradients = nnx.value_and_grad(loss)(model)
    near(found, expected)
    assert name not in gradients["layers"]["mlp"]
    for key, value in gradients["layers"]["mlp"].items():
        near(value[...], plain["layers"]["mlp"][key][...])


@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_statistics_in_a_model_over_devices_are_refused_by_name(scope: str) -> None:
    model: Any = Llama(CONFIG, scope=scope, rngs=nnx.Rngs(0))
    model.layers.mlp.w_gate = nnx.BatchStat(model.layers.mlp.w_gate[...])
    mesh = jax.make_mesh((2,), ("dp_shard",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(UnsupportedError, match=r"layers\.mlp\.w_gate must be a parameter, got BatchStat"):
        parallelize(model, mesh, ParallelConfig(data=DataParallel()))


def test_tile_of_a_module_sees_its_arrays() -> None:
    module = mlp("gated")
    module.w_gate = Frozen(module.w_gate[...])
    near(tile(module, num_shards=2)(x(6)), module(x(6)))


class Owned(nnx.Param):
    """A kind of parameter of somebody's own."""


@pytest.mark.parametrize("head", [False, True])
def test_variables_given_to_a_module_stay_what_they_are(head: bool) -> None:
    """Their type, by which filters go, and their metadata, by which they are placed."""
    made = nnx.initializers.lecun_normal()
    shapes = [(H, V)] if head else [(H, I), (H, I), (I, H)]
    given = [Owned(made(jax.random.key(i), shape, jnp.float32), placed="here") for i, shape in enumerate(shapes)]
    module: Any = TiledLinearCrossEntropy.from_weights(*given) if head else TiledMLP.from_weights(*given)
    names = ("weight",) if head else ("w_gate", "w_up", "w_down")
    assert all(getattr(module, name) is variable for name, variable in zip(names, given, strict=True))
    assert len(jax.tree.leaves(nnx.state(module, Owned))) == len(given)
    assert module.weight.placed == "here" if head else module.w_down.placed == "here"


@pytest.mark.parametrize("name", ["TiledMLP", "TiledLinear"])
def test_an_initialiser_with_axes_of_its_own_is_refused(name: str) -> None:
    """The axes of gate's dims are not those of down's, nor a weight's those of its tiles."""
    message = f"{name}: kernel_init must be without mesh axes of its own, got with_partitioning"
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("hidden", "inner"))
    with pytest.raises(UnsupportedError, match=message):
        getattr(tiled_jax, name)(H, I, kernel_init=init, rngs=nnx.Rngs(0))
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("hidden", "inner"))
    with pytest.raises(UnsupportedError, match=message):
        getattr(linen, name)(H, I, kernel_init=init).init(jax.random.key(0), x(3))

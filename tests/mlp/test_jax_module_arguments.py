"""The arguments that Flax users give to `TiledMLP` and its kin, nnx and linen alike: each is used, or refused in words."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from shared_specs.config import ACTIVATIONS
from shared_specs.tolerances import MODEL_FLOAT32
from tests.asserting import assert_within
from tests.mlp.jax_untiled import operands
from tiled_jax import (
    SpecError,
    TiledLinear,
    TiledLinearCrossEntropy,
    TiledMLP,
    TiledMoE,
    Tiling,
    UnsupportedError,
    linen,
    tiled_linear_cross_entropy,
    tiled_mlp,
)
from tiled_jax.core.activation_functions import activate_alone, recognised

FUNCTIONS: dict[str, Any] = {
    "nnx.silu": (nnx.silu, "silu"),
    "nn.swish": (nn.swish, "silu"),
    "own silu": (lambda a: a * jax.nn.sigmoid(a), "silu"),
    "nnx.gelu": (nnx.gelu, "gelu_tanh"),
    "exact gelu": (partial(jax.nn.gelu, approximate=False), "gelu"),
    "tanh gelu": (partial(jax.nn.gelu, approximate=True), "gelu_tanh"),
    "nnx.relu": (nnx.relu, "relu"),
    "squared relu": (lambda a: jnp.square(jax.nn.relu(a)), "relu_squared"),
}
# Near one of them, but another function: in its slope at zero, in far values, over neighbours, in its slopes everywhere.
OTHERS: dict[str, Callable[..., Any]] = {
    "slope of a half at zero": lambda a: jnp.maximum(a, 0.0),
    "relu6": jax.nn.relu6,
    "capped far out": lambda a: jnp.minimum(jax.nn.silu(a), 5e3),
    "softmax": jax.nn.softmax,
    "glu": jax.nn.glu,
    "no slopes": lambda a: lax.stop_gradient(jax.nn.silu(a)),
    "quick gelu": lambda a: a * jax.nn.sigmoid(1.702 * a),
    "leaky": jax.nn.leaky_relu,
    "two arguments": jnp.add,
    "another shape": jnp.sum,
    "another dtype": lambda a: jax.nn.silu(a).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_is_known_by_its_values(name: str) -> None:
    fn, expected = FUNCTIONS[name]
    assert recognised(fn) == expected
    x = operands(3, dtype=jnp.float32)[0]
    for kind in ({}, {"gated": False}):
        module, twin = (TiledMLP(8, 12, activation=a, rngs=nnx.Rngs(0), **kind) for a in (fn, expected))
        np.testing.assert_array_equal(module(x), twin(x))
    of_linen = linen.TiledMLP(8, 12, activation=fn)
    variables = jax.jit(of_linen.init)(jax.random.key(0), x)  # the function is tried while a program is traced
    y = jax.jit(of_linen.apply)(variables, x)
    weights = (variables["params"][key] for key in ("w_gate", "w_up", "w_down"))
    assert_within(np.asarray(y), np.asarray(tiled_mlp(x, *weights, activation=expected)), MODEL_FLOAT32, name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_an_activation_is_refused(name: str) -> None:
    assert recognised(OTHERS[name]) is None
    text = r"^TiledMLP: activation must be one of silu, .*, or a function that computes one of them, got the function "
    with pytest.raises(SpecError, match=text):
        TiledMLP(8, 12, activation=OTHERS[name], rngs=nnx.Rngs(0))
    with pytest.raises(SpecError, match=text):
        linen.TiledMLP(8, 12, activation=OTHERS[name]).init(jax.random.key(0), jnp.ones((2, 8)))


def test_a_layer_with_state_is_no_function() -> None:
    assert recognised(nnx.PReLU(negative_slope_init=0.0)) is None
    text = r"^TiledMLP: activation must be one of silu, .*It has state or hooks of its own: `tile` takes a module"
    with pytest.raises(SpecError, match=text):
        TiledMLP(8, 12, activation=nnx.PReLU(negative_slope_init=0.0), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_as_a_function_has_the_slopes_of_the_specification(activation: str) -> None:
    assert recognised(partial(activate_alone, activation)) == activation


def test_a_function_without_a_hash_is_tried_too() -> None:
    class Silu:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, a: jax.Array) -> jax.Array:
            return jax.nn.silu(a)

    assert recognised(Silu()) == "silu"


MODULES: dict[str, Callable[..., Any]] = {
    "TiledMLP": partial(TiledMLP, 8, 12),
    "TiledLinear": partial(TiledLinear, 8, 12),
    "TiledLinearCrossEntropy": partial(TiledLinearCrossEntropy, 8, 12),
}


@pytest.mark.parametrize("name", MODULES)
def test_streams_that_are_missing_are_asked_for(name: str) -> None:
    text = rf"^{name}: rngs must be nnx.Rngs, got NoneType. Pass rngs=nnx.Rngs\(0\), or of a seed of your own.$"
    with pytest.raises(TypeError, match=text):
        MODULES[name]()


def parameters(name: str, **options: Any) -> list[set[str]]:
    """Return the names of the parameters of a module and of its linen twin."""
    module, twin, x = (
        MODULES[name](rngs=nnx.Rngs(0), **options),
        getattr(linen, name)(8, 12, **options),
        jnp.ones((3, 8)),
    )
    calls = (x, jnp.zeros(3, jnp.int32)) if name == "TiledLinearCrossEntropy" else (x,)
    drawn = twin.init(jax.random.key(0), *calls)["params"]
    return [{str(path[0]) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}, set(drawn)]


@pytest.mark.parametrize("name", MODULES)
def test_use_bias_is_bias(name: str) -> None:
    default = name == "TiledLinear"
    for use_bias in (True, False):
        assert parameters(name, use_bias=use_bias) == parameters(name, bias=use_bias)
    assert parameters(name, use_bias=True) != parameters(name, use_bias=False)
    text = rf"^{name}: use_bias must be {not default} beside bias={not default}, or left out, got {default}\."
    for made in (partial(MODULES[name], rngs=nnx.Rngs(0)), partial(parameters, name)):
        with pytest.raises(SpecError, match=text):
            made(bias=not default, use_bias=default)
    with pytest.raises(TypeError, match=f"^{name}: use_bias must be True or False, got int"):
        parameters(name, use_bias=1)


MASKED = ("kernel", "weight", "w_", "embedding")  # as docs/quickstart_jax.md says


@pytest.mark.parametrize("fused", [False, True])
def test_a_mask_by_names_decays_weights_alone(fused: bool) -> None:
    """Of a model with layers of Flax around the tiled ones, whose names are others."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed, self.dense = nnx.Embed(6, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.mlp = TiledMLP(8, 12, bias=True, fused_gate_up=fused, rngs=rngs)
            self.linear, self.experts = TiledLinear(8, 8, rngs=rngs), TiledMoE(8, 12, 4, 2, rngs=rngs)
            self.head = TiledLinearCrossEntropy(8, 6, bias=True, rngs=rngs)

    def decayed(params: nnx.State) -> nnx.State:
        return nnx.map_state(lambda path, leaf: str(path[-1]).startswith(MASKED), params)

    model = Model(nnx.Rngs(0))
    params = jax.tree.map(lambda a: jnp.ones_like(a), nnx.state(model, nnx.Param))
    nnx.update(model, params)
    decay = optax.chain(optax.add_decayed_weights(0.5, mask=decayed), optax.scale(-1.0))
    optimizer = nnx.Optimizer(model, decay, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, params))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        is_bias = str(path[-1]).startswith(("bias", "b_"))
        assert (np.asarray(leaf.get_value()) == (1.0 if is_bias else 0.5)).all(), path

    module = linen.TiledMLP(8, 12, bias=True, fused_gate_up=fused)
    given = module.init(jax.random.key(0), jnp.ones((2, 8)))
    mask = jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key.startswith(MASKED), given)
    assert {name: of == (given["params"][name].ndim == 2) for name, of in mask["params"].items()} == dict.fromkeys(
        given["params"], True
    )


@pytest.mark.parametrize("name", MODULES)
def test_precision_is_the_highest_or_refused(name: str) -> None:
    for precision in (None, lax.Precision.HIGHEST, "highest", (lax.Precision.HIGHEST, lax.Precision.HIGHEST)):
        parameters(name, precision=precision)
    for precision in (lax.Precision.DEFAULT, "high", (None, lax.Precision.HIGH), lax.DotAlgorithmPreset.BF16_BF16_F32):
        with pytest.raises(UnsupportedError, match=rf"^{name}: precision must be None or HIGHEST here, got "):
            MODULES[name](rngs=nnx.Rngs(0), precision=precision)
    twin, x = getattr(linen, name)(8, 12, precision="high"), jnp.ones((3, 8))
    with pytest.raises(UnsupportedError, match=rf"^{name}: precision must be None or HIGHEST here, got 'high'"):
        twin.init(jax.random.key(0), *((x, jnp.zeros(3, jnp.int32)) if name == "TiledLinearCrossEntropy" else (x,)))


def test_initialisers_of_tiles_are_the_users() -> None:
    given = {"kernel_init": nnx.initializers.ones, "bias_init": nnx.initializers.constant(2.0), "in_splits": 2}
    module, twin = TiledLinear(8, 12, rngs=nnx.Rngs(0), **given), linen.TiledLinear(8, 12, **given)
    params = twin.init(jax.random.key(0), jnp.ones((3, 8)))["params"]
    for key, value in (("weight", 1.0), ("bias", 2.0)):
        assert (np.asarray(getattr(module, key)[...]) == value).all()
        assert (np.asarray(params[key]) == value).all()
    args = {"kernel_init": nnx.initializers.zeros}
    text = r"^TiledLinear: kernel_init must be left out where linear_args has one"
    with pytest.raises(SpecError, match=text):
        TiledLinear(8, 12, rngs=nnx.Rngs(0), linear_args=args, **given)
    with pytest.raises(SpecError, match=text):
        linen.TiledLinear(8, 12, linear_args=args, **given).init(jax.random.key(0), jnp.ones((3, 8)))


def test_numbers_of_numpy_are_numbers() -> None:
    x = operands(20, dtype=jnp.float32)[0]
    sizes = np.int64(8), np.int32(12)
    module = TiledMLP(*sizes, num_shards=np.int64(3), keep=np.float32(0.5), rngs=nnx.Rngs(0))
    expected = TiledMLP(8, 12, num_shards=3, keep=0.5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module(x), expected(x))
    assert module.config == expected.config
    assert {type(value) for value in (module.config.tiling.num_shards, module.config.tiling.keep)} == {int, float}
    names = ("w_gate", "w_up", "w_down")
    weights = [getattr(module, name)[...] for name in names]
    plain = tiled_mlp(x, *weights, tiling=Tiling(shard_tokens=5))
    np.testing.assert_array_equal(tiled_mlp(x, *weights, tiling=Tiling(shard_tokens=np.int16(5))), plain)
    twin, params = linen.TiledMLP(*sizes, num_shards=np.int64(3)), dict(zip(names, weights, strict=True))
    np.testing.assert_array_equal(twin.apply({"params": params}, x), module(x))
    TiledLinear(*sizes, in_splits=np.int64(2), rngs=nnx.Rngs(0))(x)
    for wrong in (np.bool_(True), np.float64(3.0)):
        with pytest.raises(TypeError, match="num_shards must be an integer or None"):
            TiledMLP(8, 12, num_shards=wrong, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_labels_as_token_files_keep_them(dtype: Any) -> None:
    x, weight = jnp.linspace(-1, 1, 40).reshape(5, 8), jnp.linspace(-2, 1, 96).reshape(8, 12)
    targets = np.asarray([0, 11, 3, 7, 9], dtype)
    expected = tiled_linear_cross_entropy(x, weight, targets.astype(np.int32), num_shards=2)
    for given in (targets, jnp.asarray(targets)):
        np.testing.assert_array_equal(tiled_linear_cross_entropy(x, weight, given, num_shards=2), expected)
    head = TiledLinearCrossEntropy.from_weights(weight, num_shards=2)
    np.testing.assert_array_equal(jax.jit(lambda head, x, y: head(x, y))(head, x, targets), expected)
    with pytest.raises(SpecError, match=r"targets must be in \[0, 12\) or ignore_index = -100, got 200"):
        tiled_linear_cross_entropy(x, weight, np.asarray([0, 200, 3, 7, 9], dtype))


def test_one_token_and_the_tokens_one_by_one() -> None:
    module, x = TiledMLP(8, 12, bias=True, num_shards=2, rngs=nnx.Rngs(0)), operands(5, dtype=jnp.float32)[0]
    assert module(x[0]).shape == (8,)

    def loss(call: Callable[..., Any]) -> Any:
        return nnx.jit(nnx.value_and_grad(lambda module, x: jnp.sum(jnp.sin(call(module, x)))))(module, x)

    whole = loss(lambda module, x: module(x))
    for call in (lambda module, x: jax.vmap(module)(x), lambda module, x: jnp.stack([module(row) for row in x])):
        for found, expected in zip(jax.tree.leaves(loss(call)), jax.tree.leaves(whole), strict=True):
            assert_within(np.asarray(found), np.asarray(expected), MODEL_FLOAT32, "token by token")

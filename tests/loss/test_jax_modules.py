"""`TiledLinearCrossEntropy` for nnx and linen: parameters, dtypes, sharding metadata, the function's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.mlp.jax_untiled import cross_entropy, loss_operands
from tiled_jax import (
    LossOptions,
    LossResult,
    SpecError,
    TiledLinearCrossEntropy,
    Tiling,
    UnsupportedError,
    linen,
)

Arrays = dict[str, np.ndarray]


def parameters(module: nnx.Module) -> Arrays:
    return {str(path[0]): np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_and_their_gradients(bias: bool) -> None:
    x, _, targets = loss_operands(3, 5, dtype=jnp.float32)
    loss = LossOptions(class_weight=jnp.linspace(0.5, 2.0, 13), label_smoothing=0.1)
    options: dict[str, Any] = {"bias": bias, "loss": loss, "num_shards": 4}
    twin: Any = linen.TiledLinearCrossEntropy(8, 13, **options)
    params = twin.init(jax.random.key(0), x, targets)["params"]
    assert {name: a.shape for name, a in params.items()} == {"weight": (8, 13)} | ({"bias": (13,)} if bias else {})
    module = TiledLinearCrossEntropy(8, 13, rngs=nnx.Rngs(0), **options)
    for name, value in params.items():
        getattr(module, name)[...] = value
    gradient = nnx.jit(nnx.grad(lambda module, x: module(x, targets)))(module, x)
    of_linen = jax.jit(jax.grad(lambda params: twin.apply({"params": params}, x, targets)))(params)
    assert set(parameters(gradient)) == set(of_linen)
    for name, expected in of_linen.items():
        assert np.asarray(expected).any(), name
        assert_within(parameters(gradient)[name], np.asarray(expected), limit(0.0, "float32"), name)


def test_from_weights_options_and_a_count_given_with_the_call(same: Any) -> None:
    x, weight, targets = loss_operands(3, 5)
    bias, class_weight = jnp.cos(jnp.arange(13.0)), jnp.linspace(0.5, 2.0, 13)
    loss = LossOptions(class_weight=class_weight, num_valid=jnp.float64(7.0), outputs=("lse",))
    module: Any = TiledLinearCrossEntropy.from_weights(weight, bias=bias, loss=loss, num_shards=4)
    assert module.weight[...] is weight, "the weight was copied"
    result = nnx.jit(lambda module, x: module(x, targets))(module, x)
    assert isinstance(result, LossResult)
    same(result, cross_entropy(x, weight, targets, bias, loss=loss))
    other = LossOptions(class_weight=class_weight, num_valid=3.0)
    same(module(x, targets, num_valid=jnp.float64(3.0)).loss, cross_entropy(x, weight, targets, bias, loss=other))
    twin: Any = linen.TiledLinearCrossEntropy(8, 13, bias=True, loss=loss)
    applied = twin.apply({"params": {"weight": weight, "bias": bias}}, x, targets, num_valid=3.0)
    same(applied.loss, cross_entropy(x, weight, targets, bias, loss=other))


def test_a_weight_for_each_token_is_given_with_the_call(same: Any) -> None:
    x, weight, targets = loss_operands(3, 5)
    token_weight = jnp.linspace(0.0, 2.0, 15).reshape(3, 5)
    per_token = cross_entropy(x, weight, targets, loss=LossOptions(reduction="none"))
    expected = jnp.sum(token_weight * per_token) / jnp.sum(targets != -100, dtype=per_token.dtype)
    module: Any = TiledLinearCrossEntropy.from_weights(weight, num_shards=4)
    twin: Any = linen.TiledLinearCrossEntropy(8, 13)
    same(module(x, targets, token_weight=token_weight), expected)
    same(twin.apply({"params": {"weight": weight}}, x, targets, token_weight=token_weight), expected)


def test_from_weights_refuses_what_does_not_fit() -> None:
    with pytest.raises(SpecError, match=r"^TiledLinearCrossEntropy\.from_weights: bias must be \[13\], got \[8\]\."):
        TiledLinearCrossEntropy.from_weights(jnp.ones((8, 13)), bias=jnp.ones(8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, None])
def test_dtypes(dtype: Any) -> None:
    x, _, targets = loss_operands(16, dtype=jnp.float32)
    module = TiledLinearCrossEntropy(8, 13, num_shards=4, dtype=dtype, rngs=nnx.Rngs(0))
    loss, gradient = nnx.value_and_grad(lambda module: module(x, targets))(module)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}, "master weights keep float32"


@pytest.mark.parametrize("of_linen", [False, True])
def test_integers_are_refused(of_linen: bool) -> None:
    """They are not cast to what the parameters have."""
    x, _, targets = loss_operands(3, 5, dtype=jnp.float32)
    twin: Any = linen.TiledLinearCrossEntropy(8, 13)
    params = twin.init(jax.random.key(0), x, targets)
    module = TiledLinearCrossEntropy(8, 13, rngs=nnx.Rngs(0))
    integers = jnp.ones((3, 5, 8), jnp.int32)
    with pytest.raises(SpecError, match=r"^tiled_linear_cross_entropy: x must be of dtype float32, .*, got int32\."):
        _ = twin.apply(params, integers, targets) if of_linen else module(integers, targets)


def test_training_moves_the_parameters_alone() -> None:
    x, _, targets = loss_operands(3, 5, dtype=jnp.float32)
    loss = LossOptions(class_weight=jnp.linspace(0.5, 2.0, 13))
    head: Any = TiledLinearCrossEntropy(8, 13, bias=True, loss=loss, tiling=Tiling(shard_tokens=4), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(head, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(head: TiledLinearCrossEntropy, optimizer: nnx.Optimizer) -> jax.Array:
        value, gradient = nnx.value_and_grad(lambda head: head(x, targets))(head)
        optimizer.update(head, gradient)
        return value

    values = [float(step(head, optimizer)) for _ in range(3)]
    assert values[2] < values[1] < values[0]
    np.testing.assert_array_equal(np.asarray(head.class_weight[...]), np.asarray(loss.class_weight))


def test_sharding_metadata() -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    expected = {"weight": P(None, "tensor"), "bias": P("tensor")}
    with jax.set_mesh(mesh):
        module = TiledLinearCrossEntropy(8, 16, bias=True, sharding=(None, "tensor"), rngs=nnx.Rngs(0))
        assert {name: getattr(module, name)[...].sharding.spec for name in expected} == expected
    x, _, targets = loss_operands(3, dtype=jnp.float32)
    twin: Any = linen.TiledLinearCrossEntropy(8, 16, bias=True, sharding=(None, "tensor"))
    boxed = twin.init(jax.random.key(0), x, targets)["params"]
    assert {name: box.names for name, box in boxed.items()} == {name: tuple(spec) for name, spec in expected.items()}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": LossOptions(z_loss=-1.0)}, SpecError, r"loss\.z_loss must be >= 0, got -1\.0"),
        ({"loss": "mean"}, TypeError, "loss must be a LossOptions, got str"),
        ({"num_shards": 0}, SpecError, "num_shards must be >= 1, got 0"),
        ({"tiling": Tiling(keep=0.5)}, SpecError, "keep must be left out, got 0.5"),
        ({"backend": "pallas"}, UnsupportedError, "backend must be usable here, got 'pallas'"),
        ({"sharding": "tensor"}, TypeError, r"sharding must be \(axis of hidden, axis of vocab\) or None"),
    ],
)
def test_bad_options_fail_when_the_module_is_made(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^TiledLinearCrossEntropy: {message}"):
        TiledLinearCrossEntropy(8, 13, rngs=nnx.Rngs(0), **options)


def test_bad_sizes() -> None:
    with pytest.raises(SpecError, match="vocab_size must be >= 1, got 0"):
        TiledLinearCrossEntropy(8, 0, rngs=nnx.Rngs(0))

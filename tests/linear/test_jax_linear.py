"""`TiledLinear` for nnx and linen: any tiles are one linear layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from shared_specs.signatures import LINEN_WITHOUT, REQUIRED, SIGNATURES
from tiled_jax import SpecError, TiledLinear, TiledLinearReturnBias, UnsupportedError, linen
from tiled_jax.linear.autodiff import Cut, Tiles

IN, OUT = 13, 11
SPLITS = [(1, 1), (3, 4), (13, 1)]


def plain(x: jax.Array, params: Any) -> jax.Array:
    return jnp.dot(x, params["kernel"], precision="highest") + params["bias"]


def drawn(*shape: int, seed: int = 0, dtype: Any = None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype or jnp.float64)


def dense(inputs: int = IN, outputs: int = OUT, dtype: Any = None) -> dict[str, jax.Array]:
    return {"kernel": drawn(inputs, outputs, seed=1, dtype=dtype), "bias": drawn(outputs, seed=2, dtype=dtype)}


def results_and_gradients(fn: Any, *arguments: Any) -> Any:
    """The result of fn and the gradients of its arguments, for upstream gradients that differ from value to value."""

    @jax.jit
    def run(*arguments: Any) -> Any:
        y, pull = jax.vjp(fn, *arguments)
        return y, pull(jax.tree.map(jnp.cos, y))

    return run(*arguments)


def as_linear(params: Any) -> nnx.Linear:
    linear = nnx.Linear(*params["kernel"].shape, rngs=nnx.Rngs(0), param_dtype=params["kernel"].dtype)
    linear.kernel[...], linear.bias[...] = params["kernel"], params["bias"]
    return linear


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_any_tiles_are_the_same_layer(splits: tuple[int, int], same: Any) -> None:
    """y, dx and every gradient; of nnx and of linen; the gradient of what pads a tile is zero, and there is as much."""
    x, params, options = drawn(3, 5, IN), dense(), {"in_splits": splits[0], "out_splits": splits[1]}
    expected = results_and_gradients(plain, x, params)

    module = TiledLinear.from_linear(as_linear(params), **options)
    y, (dx, grads) = results_and_gradients(lambda x, module: module(x), x, module)
    back = {"kernel": grads.to_linear().kernel[...], "bias": grads.bias[...]}
    same((y, (dx, back)), expected)
    full = np.asarray(grads.weight[...])
    assert full.size - np.count_nonzero(full) == full.size - IN * OUT

    twin: Any = linen.TiledLinear(IN, OUT, **options)
    tiled = twin.tile_params(params)
    y, (dx, grads) = results_and_gradients(lambda x, p: twin.apply({"params": p}, x), x, tiled)
    same((y, (dx, twin.untile_params(grads))), expected)
    shapes = jax.tree.map(lambda a: a.shape, twin.init(jax.random.key(0), jnp.ones((1, IN), jnp.float32))["params"])
    assert shapes == jax.tree.map(lambda a: a.shape, tiled)


def test_split_inputs_and_outputs_and_the_bias_apart(same: Any) -> None:
    """A run of 13 in 3 is 5, 4, 4; of 11 in 4 is 3, 3, 3, 2."""
    x, params = drawn(3, 5, IN), dense()
    forms = {"in_splits": 3, "out_splits": 4, "input_is_already_split": True, "combine_out_splits": False}
    parts, expected = jnp.split(x, [5, 9], -1), jnp.split(plain(x, params), [3, 6, 9], -1)
    module = TiledLinear.from_linear(as_linear(params), **forms)
    same(module(parts), expected)
    joined = TiledLinear.from_linear(module.to_linear(), in_splits=3, input_is_already_split=True)
    same(joined(tuple(parts)), plain(x, params))

    apart = TiledLinearReturnBias.from_linear(as_linear(params), **forms)
    y, bias = apart(parts)
    same([a + b for a, b in zip(y, bias, strict=True)], expected)
    y, bias = TiledLinearReturnBias.from_linear(as_linear(params), out_splits=4)(x)
    same((y, bias), (jnp.dot(x, params["kernel"], precision="highest"), params["bias"]))
    assert TiledLinearReturnBias(IN, OUT, bias=False, rngs=nnx.Rngs(0))(x.astype(jnp.float32))[1] is None

    twin: Any = linen.TiledLinearReturnBias(IN, OUT, out_splits=4, combine_out_splits=False)
    y, bias = twin.apply({"params": twin.tile_params(params)}, x)
    same([a + b for a, b in zip(y, bias, strict=True)], expected)


def test_initial_values_are_those_of_the_plain_layer() -> None:
    splits, options = (3, 4), {"in_splits": 3, "out_splits": 4}
    args = {"bias_init": nnx.initializers.normal(), "kernel_init": nnx.initializers.glorot_normal()}
    for linear_args in ({}, args):
        module = TiledLinear(IN, OUT, rngs=nnx.Rngs(3), linear_args=linear_args, linear_cls=nnx.Linear, **options)
        twin, found = nnx.Linear(IN, OUT, rngs=nnx.Rngs(3), **linear_args), module.to_linear()
        np.testing.assert_array_equal(found.kernel[...], twin.kernel[...])
        np.testing.assert_array_equal(found.bias[...], twin.bias[...])
        assert jax.tree.structure(nnx.state(found)) == jax.tree.structure(nnx.state(twin))
    weight = linen.TiledLinear(IN, OUT, **options).init(jax.random.key(3), jnp.ones((1, IN)))["params"]["weight"]
    kernel: Any = nn.Dense(OUT).init(jax.random.key(3), jnp.ones((1, IN)))["params"]["kernel"]
    tiles = Tiles(Cut(IN, splits[0]), Cut(OUT, splits[1]))
    assert 0.5 < np.asarray(tiles.unstack(weight)).std() / np.asarray(kernel).std() < 2, (
        "the fan-in is the whole layer's"
    )


def test_copying_from_a_plain_layer() -> None:
    source = nnx.Linear(IN, OUT, rngs=nnx.Rngs(5))
    made = TiledLinear(IN, OUT, in_splits=3, out_splits=4, init_linear=source, rngs=nnx.Rngs(0))
    copied = TiledLinear(IN, OUT, in_splits=13, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    copied.copy_params_from(source)
    assert copied.weight[...].dtype == copied.bias[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(made.to_linear().kernel[...], source.kernel[...])
    np.testing.assert_array_equal(copied.to_linear().kernel[...], source.kernel[...].astype(jnp.bfloat16))
    without = TiledLinear.from_linear(nnx.Linear(IN, OUT, use_bias=False, rngs=nnx.Rngs(5)), out_splits=2)
    assert without.bias is None
    assert without.to_linear().use_bias is False


def test_master_weights_and_a_step_of_an_optimizer() -> None:
    """float32 gradients beside bfloat16 work; weight decay leaves the padding what it is."""
    module = TiledLinear(IN, OUT, in_splits=3, out_splits=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(module: TiledLinear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda module: jnp.mean(jnp.square(module(x).astype(jnp.float32))))(module)
        assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
        optimizer.update(module, gradient)
        return loss

    x = drawn(4, IN, dtype=jnp.float32)
    assert module(x).dtype == jnp.bfloat16
    losses = [float(step(module, optimizer, x)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert np.count_nonzero(module.weight[...]) == IN * OUT


def test_second_derivatives(same: Any) -> None:
    x, params = drawn(5, IN), dense()
    module = TiledLinear.from_linear(as_linear(params), in_splits=3, out_splits=4)

    def twice(fn: Any, x: jax.Array) -> Any:
        def slope(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))(x)

        return jax.grad(lambda x: jnp.sum(jnp.square(slope(x))))(x)

    same(*jax.jit(lambda x: (twice(module, x), twice(lambda x: plain(x, params), x)))(x))


def test_in_a_scan_over_layers_under_a_checkpoint(same: Any) -> None:
    layers, x = drawn(3, 8, 8, seed=4), drawn(5, 8)
    twin: Any = linen.TiledLinear(8, 8, bias=False, in_splits=3, out_splits=2)
    tiles = Tiles(Cut(8, 3), Cut(8, 2))

    def stack(layer: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + jax.checkpoint(layer)(x, w), None), x, weights)[0]

    tiled = results_and_gradients(
        lambda x, w: stack(lambda x, w: twin.apply({"params": {"weight": tiles.stack(w)}}, x), x, w), x, layers
    )
    same(tiled, results_and_gradients(lambda x, w: stack(jnp.dot, x, w), x, layers))


@pytest.mark.parametrize("name", LINEN_WITHOUT)
def test_the_linen_twins_have_the_same_fields(name: str) -> None:
    arguments = [argument for argument in SIGNATURES[name] if "jax" in argument.halves]
    fields = {field.name: field.default for field in dataclasses.fields(getattr(linen, name)) if field.kw_only is False}
    expected = [argument.name for argument in arguments if argument.name not in LINEN_WITHOUT[name]]
    assert [field for field in fields if field not in ("parent", "name")] == expected
    for argument in arguments:
        if argument.name in fields and argument.default is not REQUIRED:
            assert fields[argument.name] == argument.default, argument.name


def test_linen_takes_the_class_of_plain_layers() -> None:
    x, key = jnp.ones((1, IN)), jax.random.key(3)
    made, plain = (linen.TiledLinear(IN, OUT, in_splits=3, linear_cls=cls).init(key, x) for cls in (nn.Dense, None))
    jax.tree.map(np.testing.assert_array_equal, made, plain)
    for wrong in (nnx.Linear, nn.Einsum):
        with pytest.raises(UnsupportedError, match=r"^TiledLinear: linear_cls must be None or nn\.Dense here, got "):
            linen.TiledLinear(IN, OUT, linear_cls=wrong).init(key, x)


class Doubled(nnx.Linear):
    """More than its parameters say."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return 2 * super().__call__(inputs)


@pytest.mark.parametrize(
    ("linear", "got"),
    [
        (lambda: Doubled(IN, OUT, rngs=nnx.Rngs(0)), "Doubled with a call of its own"),
        (lambda: nnx.LoRALinear(IN, OUT, lora_rank=2, rngs=nnx.Rngs(0)), "LoRALinear with a call of its own"),
        (lambda: nnx.Linear(IN, OUT, precision="highest", rngs=nnx.Rngs(0)), "Linear with precision=highest"),
    ],
)
def test_a_layer_that_is_more_than_its_parameters_is_not_converted(linear: Any, got: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^TiledLinear\.from_linear: linear must be a plain layer, got {got}\."
    ):
        TiledLinear.from_linear(linear())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"linear_cls": nnx.Einsum}, UnsupportedError, "linear_cls must be None or nnx.Linear here, got Einsum"),
        ({"linear_args": {"precision": "highest"}}, UnsupportedError, "linear_args must be of kernel_init, bias_init"),
        ({"linear_args": {"use_bias": True}}, SpecError, "TiledLinear passes it"),
        ({"sharding": "fsdp"}, TypeError, r"sharding must be \(axis of in, axis of out\) or None"),
        ({"in_splits": 14}, SpecError, r"in_splits must be in \[1, 13\], got 14"),
    ],
)
def test_bad_options_fail_when_the_module_is_made(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TiledLinear(IN, OUT, rngs=nnx.Rngs(0), **options)

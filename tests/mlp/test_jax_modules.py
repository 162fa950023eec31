"""`TiledMLP` for nnx and linen: parameters, dtypes, sharding metadata, and the same numbers as the function."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tiled_jax
from shared_specs.tolerances import MODEL_FLOAT32
from tests.asserting import assert_within
from tests.mlp.jax_untiled import mlp, operands
from tiled_jax import (
    SpecError,
    TiledLinear,
    TiledLinearCrossEntropy,
    TiledMLP,
    Tiling,
    UnsupportedError,
    linen,
    tiled_mlp,
)
from tiled_jax.mlp.params import make_config, param_shapes

SHAPES = {"w_gate": (8, 12), "w_up": (8, 12), "w_down": (12, 8)}
BIASES = {"b_gate": (12,), "b_up": (12,), "b_down": (8,)}


def shapes_of(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    return {str(path[0]): param.shape for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SHAPES),
        ({"bias": True}, SHAPES | BIASES),
        ({"gated": False}, {"w_up": (8, 12), "w_down": (12, 8)}),
        (
            {"fused_gate_up": True, "bias": True},
            {"w_gate_up": (8, 24), "b_gate_up": (24,), "w_down": (12, 8), "b_down": (8,)},
        ),
    ],
    ids=["gated", "bias", "plain", "fused"],
)
def test_parameters_and_their_gradients(options: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    x = operands(3, 5, dtype=jnp.float32)[0]
    module = TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0), **options)
    assert shapes_of(module) == expected
    twin: Any = linen.TiledMLP(8, 12, num_shards=4, **options)
    variables: Any = twin.init(jax.random.key(0), x)
    assert {name: a.shape for name, a in variables["params"].items()} == expected

    params = variables["params"]
    for name, value in params.items():
        getattr(module, name)[...] = value
    gradient = nnx.grad(lambda module, x: jnp.sum(jnp.sin(module(x))))(module, x)
    of_linen = jax.grad(lambda params: jnp.sum(jnp.sin(twin.apply({"params": params}, x))))(params)
    for name, expected_gradient in of_linen.items():
        found = np.asarray(gradient[name][...])
        assert found.any(), name
        np.testing.assert_array_equal(found, np.asarray(expected_gradient))


@pytest.mark.parametrize("fused", [False, True])
def test_from_weights(fused: bool, same: Any) -> None:
    x, *weights = operands(3, 5)
    module: Any = TiledMLP.from_weights(*weights, fused_gate_up=fused, num_shards=4)
    assert shapes_of(module) == ({"w_gate_up": (8, 24), "w_down": (12, 8)} if fused else SHAPES)
    same(module(x), mlp(x, *weights))
    if not fused:
        assert module.w_up[...] is weights[1], "the weight was copied"


def test_from_weights_with_another_output_size_and_biases(same: Any) -> None:
    x, _, w_up, _ = operands(3, 5)
    w_down, biases = jnp.ones((12, 3)), {"up": jnp.ones(12), "down": jnp.arange(3.0)}
    module = TiledMLP.from_weights(None, w_up, w_down, biases=biases, activation="relu")
    same(module(x), jax.nn.relu(x @ w_up + 1) @ w_down + jnp.arange(3.0))


def test_from_weights_refuses_what_does_not_fit() -> None:
    _, w_gate, w_up, w_down = operands(1, dtype=jnp.float32)
    with pytest.raises(SpecError, match=r"^TiledMLP\.from_weights: w_down must be \[intermediate, out\] = \[12, 8\]"):
        TiledMLP.from_weights(w_gate, w_up, w_down.T)
    with pytest.raises(SpecError, match="both gate and up, or neither"):
        TiledMLP.from_weights(w_gate, w_up, w_down, biases={"up": jnp.ones(12)}, fused_gate_up=True)


def test_from_weights_of_parameters() -> None:
    """nnx parameters and NumPy arrays are arrays, as for `tiled_mlp`."""
    x, w_gate, w_up, w_down = operands(3, dtype=jnp.float32)
    module = TiledMLP.from_weights(nnx.Param(w_gate), np.asarray(w_up), w_down)
    np.testing.assert_array_equal(module(x), TiledMLP.from_weights(w_gate, w_up, w_down)(x))


@pytest.mark.parametrize("argument", ["dtype", "param_dtype"])
def test_linen_refuses_integers(argument: str) -> None:
    module = linen.TiledMLP(8, 12, **{argument: jnp.int32})
    with pytest.raises(SpecError, match=rf"^TiledMLP: {argument} must be one of float32, .*, got int32\."):
        module.init(jax.random.key(0), jnp.ones((2, 8)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, None])
def test_dtypes(dtype: Any) -> None:
    x = operands(16, dtype=jnp.float32)[0]
    module = TiledMLP(8, 12, num_shards=4, dtype=dtype, rngs=nnx.Rngs(0))
    assert module(x).dtype == (dtype or jnp.float32)
    gradient = nnx.grad(lambda module: jnp.sum(module(x).astype(jnp.float32)))(module)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}, "master weights keep float32"
    half = TiledMLP(8, 12, dtype=dtype, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype(jnp.bfloat16)}


def test_gradients_of_master_weights_have_more_than_16_bits() -> None:
    """Sums over shards are float32, and nothing rounds them behind the call."""
    x = operands(16, dtype=jnp.float32)[0]
    module = TiledMLP(8, 12, num_shards=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda module: jnp.sum(module(x).astype(jnp.float32)))(module)
    for leaf in jax.tree.leaves(gradient):
        assert not np.array_equal(leaf, leaf.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("x", [np.ones((3, 8), np.int32), [[1.0] * 8]], ids=["integers", "list"])
def test_x_that_is_no_array_of_floats_is_refused_by_the_call(x: Any) -> None:
    error, text = (
        (SpecError, "of dtype float32, .*, got int32") if isinstance(x, np.ndarray) else (TypeError, "an array")
    )
    with pytest.raises(error, match=f"^tiled_mlp: x must be {text}"):
        TiledMLP(8, 12, rngs=nnx.Rngs(0))(x)


def test_what_flax_does_with_modules_works() -> None:
    """split and merge, stacked layers under vmap and scan, nnx.jit with an optimizer, nnx.remat."""
    x = operands(3, 5, dtype=jnp.float32)[0]

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(rngs: nnx.Rngs) -> TiledMLP:
        return TiledMLP(8, 12, tiling=Tiling(shard_tokens=4, keep=0.5), rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def apply(x: jax.Array, layer: TiledMLP) -> jax.Array:
        return x + layer(x)

    model = layers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: TiledMLP, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(apply(x, model))))(model)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, x)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_sharding_metadata() -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    x = operands(3, 5, dtype=jnp.float32)[0]
    expected = {
        "w_gate": P(None, "tensor"),
        "w_up": P(None, "tensor"),
        "w_down": P("tensor", None),
        "b_gate": P("tensor"),
        "b_up": P("tensor"),
        "b_down": P(None),
    }
    with jax.set_mesh(mesh):
        module = TiledMLP(8, 12, bias=True, num_shards=4, sharding=(None, "tensor"), rngs=nnx.Rngs(0))
        specs = {path[0]: spec for path, spec in nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module)))}
        assert {name: getattr(spec, "get_value", lambda spec=spec: spec)() for name, spec in specs.items()} == expected
        assert {name: getattr(module, name)[...].sharding.spec for name in expected} == expected
        y = jax.jit(lambda module, x: module(x))(module, x)
    weights = [jnp.asarray(np.asarray(getattr(module, name)[...])) for name in SHAPES]
    assert_within(np.asarray(y), np.asarray(tiled_mlp(x, *weights)), MODEL_FLOAT32, "sharded module")

    boxed: Any = linen.TiledMLP(8, 12, sharding=(None, "tensor")).init(jax.random.key(0), x)["params"]
    assert {name: box.names for name, box in boxed.items()} == {name: tuple(expected[name]) for name in SHAPES}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "swish"}, SpecError, "TiledMLP: activation must be one of"),
        ({"num_shards": 0}, SpecError, "TiledMLP: num_shards must be >= 1, got 0"),
        ({"backend": "pallas"}, UnsupportedError, "TiledMLP: backend must be usable here, got 'pallas'"),
        ({"gated": False, "fused_gate_up": True}, SpecError, "fused_gate_up must be False without a gate"),
        ({"sharding": "tensor"}, TypeError, "sharding must be"),
        ({"sharding": (None, "tensor"), "fused_gate_up": True}, SpecError, "sharding must be None with fused_gate_up"),
    ],
)
def test_bad_options_fail_when_the_module_is_made(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TiledMLP(8, 12, rngs=nnx.Rngs(0), **options)


def test_bad_sizes() -> None:
    with pytest.raises(SpecError, match="hidden_size must be >= 1, got 0"):
        TiledMLP(0, 12, rngs=nnx.Rngs(0))


def test_errors_name_the_module_that_was_made() -> None:
    """A module of another name has the same options."""
    options = {"gated": True, "fused_gate_up": False}
    with pytest.raises(SpecError, match=r"^Other: hidden_size must be >= 1, got 0"):
        param_shapes("Other", 0, 12, bias=False, **options)
    for name, value in (("activation", "swish"), ("num_shards", 0), ("backend", "cuda")):
        given = {"activation": "silu", "num_shards": None, "keep": 0.0, "tiling": None, "backend": "auto", name: value}
        with pytest.raises(SpecError, match=f"^Other: {name} must be "):
            make_config(**given, **options, function="Other")


MODULES_WITH_STREAMS: dict[str, Callable[[Any], Any]] = {
    "TiledMLP": lambda rngs: TiledMLP(8, 12, rngs=rngs),
    "TiledLinear": lambda rngs: TiledLinear(8, 12, rngs=rngs),
    "TiledLinearCrossEntropy": lambda rngs: TiledLinearCrossEntropy(8, 12, rngs=rngs),
}


@pytest.mark.parametrize("name", MODULES_WITH_STREAMS)
@pytest.mark.parametrize("rngs", [0, jax.random.key(0)], ids=["seed", "key"])
def test_streams_of_another_kind_are_refused(name: str, rngs: Any) -> None:
    text = rf"^{name}: rngs must be nnx.Rngs, got \w+. Pass rngs=nnx.Rngs\(0\), or of a seed of your own.$"
    with pytest.raises(TypeError, match=text):
        MODULES_WITH_STREAMS[name](rngs)


def test_a_product_is_few_calls_below_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody who steps through a call with a debugger walks: functions of this package, one under the other."""
    stacks, dot_general, package = [], lax.dot_general, str(Path(tiled_jax.__file__).parent)

    def seen(*operands: Any, **options: Any) -> jax.Array:
        frames = traceback.extract_stack()
        stacks.append([f.name for f in frames if f.filename.startswith(package) and not f.name.startswith("<")])
        return dot_general(*operands, **options)

    monkeypatch.setattr(lax, "dot_general", seen)
    TiledMLP(8, 12, num_shards=3, rngs=nnx.Rngs(0))(jnp.ones((89, 8)))  # tokens of no other test, so that it is traced
    found = next(stack for stack in stacks if stack[-1] == "product")  # the others ask what a product is now
    assert found[0] == "__call__"
    assert len(found) <= 12, found


@pytest.mark.parametrize("name", ["TiledMLP", "TiledLinearCrossEntropy"])
def test_initialisers_are_the_users(name: str) -> None:
    given = {"bias": True, "kernel_init": nnx.initializers.ones, "bias_init": nnx.initializers.constant(2.0)}
    module = getattr(tiled_jax, name)(8, 12, rngs=nnx.Rngs(0), **given)
    twin, x = getattr(linen, name)(8, 12, **given), jnp.ones((3, 8))
    calls = (x,) if name == "TiledMLP" else (x, jnp.zeros(3, jnp.int32))
    variables = twin.init(jax.random.key(0), *calls)["params"]
    for key, value in variables.items():
        expected = 2.0 if key.startswith("b") else 1.0
        assert (np.asarray(value) == expected).all()
        np.testing.assert_array_equal(getattr(module, key)[...], value)
    assert len(variables) == (6 if name == "TiledMLP" else 2)

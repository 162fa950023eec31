"""LoRA on a projection of `TiledMLP`, and in a linen MLP: exact through `tile`, and `tiling_paths` says so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from shared_specs.tolerances import MODEL_FLOAT32
from tests.asserting import assert_within
from tests.mlp.jax_untiled import operands
from tiled_jax import SpecError, TiledMLP, Tiling, tile

SIZES = {"gate": (8, 12), "up": (8, 12), "down": (12, 8)}


def layers_with_lora(on: str, *, bias: bool, dtype: Any, kind: str = "LoRA") -> dict[str, Any]:
    """Return three layers of which one has an adapter whose second factor is not the zeros it starts from."""
    rngs, made = nnx.Rngs(0), {}
    for name, sizes in SIZES.items():
        options = {"use_bias": bias, "param_dtype": dtype, "rngs": rngs}
        if name == on and kind == "LoRALinear":
            layer: Any = nnx.LoRALinear(*sizes, lora_rank=3, lora_param_dtype=dtype, **options)
        else:
            layer = nnx.Linear(*sizes, **options)
            if name == on:
                layer = nnx.LoRA(sizes[0], 3, sizes[1], base_module=layer, param_dtype=dtype, rngs=rngs)
        if name == on:
            adapter = layer.lora if kind == "LoRALinear" else layer
            adapter.lora_b[...] = jax.random.normal(jax.random.key(7), adapter.lora_b.shape, dtype)
        if bias:
            base = layer.base_module if isinstance(layer, nnx.LoRA) else layer
            base.bias[...] = jax.random.normal(jax.random.key(8), base.bias.shape, dtype)
        made[name] = layer
    return made


class Untiled(nnx.Module):
    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def results(module: nnx.Module, x: jax.Array) -> Any:
    """Return the result, and the gradients of x and of all parameters, as a list."""

    @jax.jit
    def run(module: Any, x: jax.Array) -> Any:
        y, pull = jax.vjp(lambda module, x: module(x), module, x)
        return y, pull(jnp.cos(y))

    y, (of_module, dx) = run(module, x)
    return [y, dx, *jax.tree.leaves(of_module)]


def in_order(found: Any) -> Any:
    """Return the gradients by shape and size: a `TiledMLP` has other names for its parameters."""
    return [*found[:2], *sorted(found[2:], key=lambda a: (a.shape, float(jnp.sum(jnp.abs(a)))))]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("on", "kind"), [("gate", "LoRA"), ("down", "LoRA"), ("up", "LoRALinear")])
def test_a_projection_with_an_adapter_runs_through_tile(on: str, kind: str, same: Any) -> None:
    layers, x = layers_with_lora(on, bias=True, dtype=jnp.float64, kind=kind), operands(3, 5)[0]
    module = TiledMLP.from_linears(*layers.values(), num_shards=4)
    assert module._path() == f"tile: {on} is {kind}"
    same(in_order(results(module, x)), in_order(results(Untiled(**layers), x)))
    merged = nnx.merge(*nnx.split(module))
    np.testing.assert_array_equal(merged(x), module(x))


def test_plain_layers_run_as_before(same: Any) -> None:
    layers, x = layers_with_lora("none", bias=True, dtype=jnp.float64), operands(3, 5)[0]
    module = TiledMLP.from_linears(*layers.values(), num_shards=4)
    assert module._path() == "tiled_mlp"
    same(in_order(results(module, x)), in_order(results(Untiled(**layers), x)))


@pytest.mark.parametrize("options", [
    {"precision": lax.Precision.DEFAULT},
    {"dot_general": lambda *a, **k: 2 * lax.dot_general(*a, **k)},
    {"preferred_element_type": jnp.float64},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_linear_layer_with_more_than_its_kernel_is_called(options: dict[str, Any], same: Any) -> None:
    x = operands(3, 5)[0]
    layers = layers_with_lora("none", bias=False, dtype=jnp.float64)
    for name, value in options.items():
        setattr(layers["up"], name, value)
    module = TiledMLP.from_linears(*layers.values(), num_shards=4)
    assert module._path().startswith("tile: up has a ")
    same(in_order(results(module, x)), in_order(results(Untiled(**layers), x)))


def test_only_the_adapter_trains() -> None:
    layers, x = layers_with_lora("down", bias=False, dtype=jnp.float32), operands(16, dtype=jnp.float32)[0]
    module = TiledMLP.from_linears(*layers.values(), tiling=Tiling(shard_tokens=3))
    optimizer = nnx.Optimizer(module, optax.sgd(1e-2), wrt=nnx.LoRAParam)
    before = dict(nnx.to_flat_state(jax.tree.map(jnp.array, nnx.state(module))))

    @nnx.jit
    def step(module: TiledMLP, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        of_adapter = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - 1)), argnums=of_adapter)(module)
        optimizer.update(module, gradient)
        return loss

    losses = [float(step(module, optimizer, x)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    after = nnx.to_flat_state(nnx.state(module))
    moved = {path for path, a in after if not np.array_equal(a[...], before[path][...])}
    assert moved == {("down", "lora_a"), ("down", "lora_b")}


def test_master_weights_and_16_bits() -> None:
    layers, x = layers_with_lora("gate", bias=False, dtype=jnp.float32), operands(16, dtype=jnp.float32)[0]
    for layer in (layers["gate"], layers["gate"].base_module, layers["up"], layers["down"]):
        layer.dtype = jnp.bfloat16
    module = TiledMLP.from_linears(*layers.values(), num_shards=3)
    found, expected = (jax.eval_shape(results, each, x) for each in (module, Untiled(**layers)))
    assert sorted((a.shape, a.dtype.name) for a in found) == sorted((a.shape, a.dtype.name) for a in expected)
    assert (found[0].dtype, {a.dtype for a in found[2:]}) == (jnp.bfloat16, {jnp.dtype(jnp.float32)})


def test_what_stands_in_two_forms_or_fits_no_dtype_is_refused() -> None:
    module, layers = TiledMLP(8, 12, rngs=nnx.Rngs(0)), layers_with_lora("gate", bias=False, dtype=jnp.float32)
    module.gate = layers["gate"]
    with pytest.raises(SpecError, match="gate must be the only form of its projection, got LoRA beside a weight"):
        module(jnp.ones((3, 8)))
    layers["up"].dtype = jnp.bfloat16
    with pytest.raises(SpecError, match="dtype of the layers must be the same, got up: bfloat16, down: None"):
        TiledMLP.from_linears(*layers.values())


def test_an_adapter_on_a_module_that_is_there(same: Any) -> None:
    """to_linears, LoRA around one, and back."""
    x = operands(3, 5)[0]
    module = TiledMLP(8, 12, bias=True, param_dtype=jnp.float64, num_shards=4, rngs=nnx.Rngs(0))
    gate, up, down = module.to_linears()
    adapted = TiledMLP.from_linears(
        nnx.LoRA(8, 2, 12, base_module=gate, param_dtype=jnp.float64, rngs=nnx.Rngs(1)), up, down, num_shards=4
    )
    same(adapted(x), module(x))  # an adapter starts from zero
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(adapted))}
    of_gate = {"gate/lora_a", "gate/lora_b", "gate/base_module/kernel", "gate/base_module/bias"}
    assert paths == of_gate | {"w_up", "b_up", "w_down", "b_down"}


class LoRADense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        a = self.param("a", nn.initializers.normal(), (x.shape[-1], 2))
        b = self.param("b", nn.initializers.normal(), (2, self.features))
        return nn.Dense(self.features, use_bias=False)(x) + x @ a @ b


class LinenMLP(nn.Module):
    tiled: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        whole = Projections(name="mlp")
        return tile(whole, num_shards=4)(x) if self.tiled else whole(x)


class Projections(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.silu(LoRADense(12)(x)) * nn.Dense(12)(x))


def test_linen_modules_with_adapters_run_through_tile() -> None:
    x = operands(3, 5, dtype=jnp.float32)[0]
    variables = LinenMLP(tiled=False).init(jax.random.key(0), x)

    def of(tiled: bool) -> Any:
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(LinenMLP(tiled=tiled).apply(v, x)))))(variables)

    pairs = zip(jax.tree.leaves(of(True)), jax.tree.leaves(of(False)), strict=True)
    for found, expected in pairs:
        assert_within(np.asarray(found), np.asarray(expected), MODEL_FLOAT32, "a gradient")

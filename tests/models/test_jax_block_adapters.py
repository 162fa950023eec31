"""Decoder layers with adapters of low rank that run as one block: derivatives, products, bytes, meshes, what is called."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs import SpecError, Tiling
from shared_specs.layers.block_costs import block_row_bytes
from shared_specs.tolerances import COST_BYTES, MODEL_FLOAT32, limit
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.models.jax_adapters import ATTENTION, MLP, RANK, adapt
from tests.models.test_jax_block import (
    CONFIG,
    GEMMA,
    KEY_SUMS,
    MERGES,
    RATIOS,
    RULE,
    assert_reduced_once,
    assert_same,
    both,
    layer_of,
    quickly,
    rows,
    y_and_gradients,
)
from tests.tiny_model import tiny_config
from tiled_jax import tiling_paths
from tiled_jax.layers import attention_blocks
from tiled_jax.models import Llama, LlamaConfig, next_token_loss
from tiled_jax.models.block.plain import reason_not_block


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 8, "gpu": 8})


def adapted_layer(
    names: tuple[str, ...], config: LlamaConfig = CONFIG, *, linear: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """A layer in float64, no parameter zero."""
    layer = nnx.merge(*layer_of(8, config))
    adapt(layer, names, jnp.float64, linear=linear)
    graph, state = nnx.split(layer)
    random = np.random.default_rng(0)
    return graph, jax.tree.map(lambda a: jnp.asarray(0.5 * random.standard_normal(a.shape)), state)


CASES: dict[str, tuple[tuple[str, ...], LlamaConfig, bool]] = {
    "all": (ATTENTION + MLP, CONFIG, False),
    "some, of a class": (("q", "o", "down"), CONFIG, True),
    "norms of heads and behind": (("k", "v", "gate", "up", "down"), GEMMA, False),
}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_layer(case: str, float64: None) -> None:
    """Of every parameter, a ragged last shard."""
    names, config, linear = CASES[case]
    graph, p = adapted_layer(names, config, linear=linear)
    assert reason_not_block(nnx.merge(graph, p)) is None
    x, dy = rows(2 * 21, 1), rows(2 * 21, 2)
    plain, block = (quickly(partial(y_and_gradients, fn), p, x, dy) for fn in both(graph, 2, 21))
    assert_same(block, plain)


def tokens_of(count: int) -> Any:
    return jax.ShapeDtypeStruct((1, count + 1), jnp.int32)


def shapes_of(layers: int, names: tuple[str, ...], dtype: str = "float32", wrt: Any = nnx.LoRAParam) -> Any:
    """loss and gradients of what is trained, and the shapes of it and of the rest."""
    config = LlamaConfig.from_hf(tiny_config(**RATIOS, head_dim=8, num_hidden_layers=layers, vocab_size=256))

    def build() -> Llama:
        model = Llama(config, scope="block", tiling=Tiling(shard_tokens=32), dtype=dtype, rngs=nnx.Rngs(0))
        adapt(model.layers, names, jnp.dtype(dtype))
        return model

    model = nnx.eval_shape(build)
    assert tiling_paths(model) == {"layers": "tiled_block"}
    graph, trained, rest = nnx.split(model, wrt, ...)

    def loss(p: nnx.State, rest: nnx.State, tokens: jax.Array) -> jax.Array:
        return next_token_loss(nnx.merge(graph, p, rest), tokens)

    return jax.value_and_grad(loss), trained, rest


def test_products_of_a_layer_whose_base_is_frozen() -> None:
    """No product of a weight's gradient; the base's as of a layer without adapters, down never again. To the FLOP."""
    T, H, I, K, block = 64, 128, 448, 32, 8  # noqa: E741
    one, two = (flop(*shapes_of(layers, ATTENTION + MLP), tokens_of(T)) for layers in (1, 2))
    linears = 3 * (2 * H * H + 2 * H * K) + (3 + 3 + 2) * H * I
    # x l r twice, the gradients of x, l and r from it; of down x l r once.
    adapters = RANK * (5 * (4 * H + 2 * (H + K) + 2 * (H + I)) + 4 * (I + H))
    pairs = (T // block) * (T // block + 1) // 2
    attention = (2 + 2 + 5) * pairs * block * block * H
    assert two - one == 2 * (T * (linears + adapters) + attention)


@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_a_token_are_those_of_a_layer_without_adapters(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of a frozen base there is no sum of gradients."""
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 32})
    found = {}
    for wrt in (nnx.LoRAParam, nnx.Param):
        program = shapes_of(2, ATTENTION + MLP, dtype, wrt)
        found[wrt] = [temp_bytes(*program, tokens_of(T)) for T in (1024, 2048)]
    itemsize = jnp.dtype(dtype).itemsize
    predicted = block_row_bytes(hidden=128, heads=16, kv_heads=4, head_dim=8, itemsize=itemsize, kept_layers=2)
    short, long = found[nnx.LoRAParam]
    assert (long - short) / 1024 == pytest.approx(predicted - KEY_SUMS, rel=COST_BYTES)
    sums = 4 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 448)
    assert found[nnx.Param][0] - short > 0.9 * sums


@pytest.mark.ranks
def test_sequences_over_a_mesh_reduce_every_gradient_once(float64: None) -> None:
    graph, p = adapted_layer(("q", "o", "up", "down"))
    assert_reduced_once(both(graph, 4, 12)[1], p, 4)


@pytest.mark.slow
def test_forward_mode_and_second_order(float64: None) -> None:
    graph, p = adapted_layer(("q", "o", "gate", "down"))
    x, dy = rows(20, 1), rows(20, 2)

    def derivatives(fn: Any) -> Any:
        return jax.jvp(jax.grad(lambda x: jnp.sum(fn(p, x) * dy)), (x,), (dy,)), jax.jvp(fn, (p, x), (p, dy))

    plain, block = (quickly(partial(derivatives, fn)) for fn in both(graph, 1, 20))
    assert_same(block, plain)


def _own_dtype(layers: Any) -> None:
    adapt(layers, ("q",), jnp.dtype("bfloat16"))


def _own_class(layers: Any) -> None:
    class Scaled(nnx.LoRA):
        """A subclass with a call of its own."""

    adapt(layers, ("up",), jnp.dtype("float32"))
    layers.mlp.up.__class__ = Scaled


def _own_part(layers: Any) -> None:
    adapt(layers, ("o",), jnp.dtype("float32"))
    layers.attention.o.magnitude = nnx.Param(jnp.ones(2))


def _adapter_of_an_adapter(layers: Any) -> None:
    adapt(layers, ("k", "v"), jnp.dtype("float32"))
    layers.attention.v.base_module = layers.attention.k


OTHERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "dtype": (
        _own_dtype,
        r"attention\.q has an adapter with dtype=dtype\(bfloat16\), which computes in bfloat16 beside",
    ),
    "class": (_own_class, r"mlp\.up is Scaled"),
    "part": (_own_part, r"attention\.o has an adapter with magnitude besides lora_a and lora_b"),
    "two": (_adapter_of_an_adapter, r"attention\.v is LoRA"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_adapters_of_other_kinds_are_called_and_told(name: str) -> None:
    change, reason = OTHERS[name]
    model = Llama(LlamaConfig.from_hf(tiny_config(num_hidden_layers=2)), scope="block", rngs=nnx.Rngs(0))
    change(model.layers)
    assert re.match("mlp: " + reason, tiling_paths(model)["layers"])


def filled(adapters: nnx.State) -> nnx.State:
    random = np.random.default_rng(1)
    return jax.tree.map(lambda a: jnp.asarray(0.1 * random.standard_normal(a.shape), a.dtype), adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_adapters_equals_the_one_whose_parts_are_called(dtype: str) -> None:
    """In loss and gradients of adapters, of every layer."""
    config = LlamaConfig.from_hf(tiny_config(num_hidden_layers=2))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 28)), jnp.int32)
    found = []
    for options in ({"dtype": "float32"}, {"dtype": dtype}, {"dtype": dtype, "scope": "block"}):
        model = Llama(config, tiling=Tiling(shard_tokens=10), rngs=nnx.Rngs(0), **options)  # type: ignore[arg-type]
        adapt(model.layers, ("q", "v", "o", "gate", "down"), jnp.dtype(options["dtype"]))
        nnx.update(model, filled(nnx.state(model, nnx.LoRAParam)))
        graph, trained, rest = nnx.split(model, nnx.LoRAParam, ...)
        loss = jax.value_and_grad(lambda p, g=graph, r=rest: next_token_loss(nnx.merge(g, p, r), tokens))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if "scope" not in options else "error")  # of MLPs that run through tile
            value, gradients = quickly(loss, trained)
        found.append([np.asarray(value), *map(np.asarray, jax.tree.leaves(gradients))])
    exact, called, block = found
    assert len(block) == 1 + 2 * 5
    for truth, a, b in zip(exact, called, block, strict=True):
        error = float(np.linalg.norm(a - truth) / np.linalg.norm(truth))
        assert_within(b, truth, limit(error, dtype) if dtype == "bfloat16" else MODEL_FLOAT32, "adapters")


def test_an_adapter_beside_the_weight_that_it_replaces_is_refused() -> None:
    """Nothing would use that weight."""
    model = Llama(LlamaConfig.from_hf(tiny_config(num_hidden_layers=1)), scope="block", rngs=nnx.Rngs(0))
    weight = model.layers.mlp.w_up  # type: ignore[attr-defined]
    adapt(model.layers, ("up",), jnp.dtype("float32"))
    model.layers.mlp.w_up = weight  # type: ignore[attr-defined]
    with pytest.raises(
        SpecError, match=r"^Llama: up must be the only form of its projection, got LoRA beside a weight"
    ):
        model(jnp.arange(8, dtype=jnp.int32)[None])

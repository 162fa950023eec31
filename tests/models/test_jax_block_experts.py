"""A decoder layer with experts as one block: derivatives, products, bytes, meshes, and parts that are to be called."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs import Tiling
from shared_specs.layers.block_costs import block_row_bytes
from shared_specs.moe import costs as moe_costs
from shared_specs.tolerances import COST_BYTES
from tests.core.jax_counting import flop, temp_bytes
from tests.models.test_jax_block import (
    KEY_SUMS,
    MERGES,
    RATIOS,
    RULE,
    assert_reduced_once,
    assert_same,
    quickly,
    rows,
    y_and_gradients,
)
from tests.tiny_model import tiny_config
from tiled_jax import tiling_paths
from tiled_jax.layers import attention_blocks
from tiled_jax.models import Llama, LlamaConfig, next_token_loss
from tiled_jax.models.block.function import block_layer
from tiled_jax.models.config import Experts
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.models.layer import DecoderLayer
from tiled_jax.models.rope import rotary_angles

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
CONFIG = LlamaConfig.from_hf(tiny_config(**MIXTRAL))
# A norm behind the experts, whose gradient needs what they return; shares that do not add up to one.
NORMED = replace(CONFIG, branch_norms=True, experts=Experts(count=4, chosen=3, normalised=False))


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 8, "gpu": 8})
    monkeypatch.setattr(moe_costs, "FEWEST_ROWS", 4)


def layer_of(shard_tokens: int, config: LlamaConfig = CONFIG) -> tuple[nnx.GraphDef, nnx.State]:
    """A layer in float64, no parameter zero."""

    def build() -> DecoderLayer:
        assert config.experts is not None
        options: dict[str, Any] = {"experts": config.experts, "tiling": Tiling(shard_tokens=shard_tokens)}
        mlp = ExpertsMLP(32, 64, **options, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        return DecoderLayer(config, mlp=mlp, dtype=jnp.dtype("float64"), rngs=nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(build))
    random = np.random.default_rng(0)
    return graph, jax.tree.map(lambda a: jnp.asarray(0.5 * random.standard_normal(a.shape)), state)


def both(graph: nnx.GraphDef, sequences: int, tokens: int) -> list[Callable[..., jax.Array]]:
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    return [
        lambda p, x: nnx.merge(graph, p)(x, rotary_angles(CONFIG.rope, CONFIG.head_dim, tokens)),
        lambda p, x: block_layer(nnx.merge(graph, p), x, positions, sequences),
    ]


@pytest.mark.parametrize("config", [CONFIG, NORMED], ids=["plain", "norm behind, shares as they are"])
def test_gradients_of_a_layer(config: LlamaConfig, float64: None) -> None:
    """A ragged last shard; an expert that few tokens choose, and shards without one."""
    graph, p = layer_of(8, config)
    router = p["mlp"]["router"]["kernel"]
    router[...] = router[...].at[:, 2].add(-2.0)
    x, dy = rows(2 * 21, 1), rows(2 * 21, 2)
    plain, block = (quickly(partial(y_and_gradients, fn), p, x, dy) for fn in both(graph, 2, 21))
    assert_same(block, plain)


@pytest.mark.slow
def test_forward_mode_and_second_order(float64: None) -> None:
    graph, p = layer_of(7)
    x, dy = rows(20, 1), rows(20, 2)

    def derivatives(fn: Any) -> Any:
        return jax.jvp(jax.grad(lambda x: jnp.sum(fn(p, x) * dy)), (x,), (dy,)), jax.jvp(fn, (p, x), (p, dy))

    plain, block = (quickly(partial(derivatives, fn)) for fn in both(graph, 1, 20))
    assert_same(block, plain)


def shapes_of(layers: int, dtype: str = "float32") -> Any:
    """loss and gradients, and the parameters' shapes."""
    config = tiny_config(**RATIOS, **MIXTRAL, head_dim=8, num_hidden_layers=layers, vocab_size=256)
    options: Any = {"scope": "block", "tiling": Tiling(shard_tokens=32), "dtype": dtype}
    build = lambda: Llama(LlamaConfig.from_hf(config), **options, rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    return jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens)), parameters


def test_products_of_a_layer_are_made_once_in_forward_and_once_in_backward() -> None:
    """None a third time: of the router four, of gate and up four, of down three. To the FLOP, of the rows that blocks hold."""
    T, H, I, K, shard, block = 64, 128, 448, 32, 32, 8  # noqa: E741
    tokens = jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    one, two = (flop(*shapes_of(layers), tokens) for layers in (1, 2))
    shape = moe_costs.MoEShape(tokens=T, hidden=H, intermediate=I, experts=4, top_k=2)
    rows = moe_costs.rows_of_a_block(shard * 2, 4)
    computed = T // shard * rows * moe_costs.block_count(shard * 2, 4, rows)
    linears = 4 * (2 * H * H + 2 * H * K)
    pairs = (T // block) * (T // block + 1) // 2
    attention = (2 + 2 + 5) * pairs * block * block * H
    assert two - one == 2 * (T * linears + attention) + moe_costs.moe_flop(shape, rows=computed)


@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_a_token_are_those_of_a_layer_with_one_mlp(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At two lengths: nothing of the router or of the experts is as long as the tokens."""
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 32})
    sizes = [temp_bytes(*shapes_of(2, dtype), jax.ShapeDtypeStruct((1, T + 1), jnp.int32)) for T in (1024, 2048)]
    itemsize = jnp.dtype(dtype).itemsize
    predicted = block_row_bytes(hidden=128, heads=16, kv_heads=4, head_dim=8, itemsize=itemsize, kept_layers=2)
    assert (sizes[1] - sizes[0]) / 1024 == pytest.approx(predicted - KEY_SUMS, rel=COST_BYTES)


@pytest.mark.ranks
def test_sequences_over_a_mesh_reduce_every_gradient_once(float64: None) -> None:
    graph, p = layer_of(4)
    assert_reduced_once(both(graph, 4, 12)[1], p, 4)


class _ScaledRouter(nnx.Linear):
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return 3 * super().__call__(inputs)


def _exchanged(model: Llama) -> None:
    model.layers.mlp.router.__class__ = _ScaledRouter


def _other_choice(model: Llama) -> None:
    model.layers.mlp.experts = Experts(count=4, chosen=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_exchanged, "mlp.router is _ScaledRouter"), (_other_choice, "mlp has options of its own")],
    ids=["router", "options"],
)
def test_a_changed_part_of_the_experts_is_called(change: Callable[[Llama], None], reason: str) -> None:
    """The layers then run as they are, and say why."""
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    logits = []
    for scope in ("mlp", "block"):
        model = Llama(CONFIG, scope=scope, rngs=nnx.Rngs(0))
        change(model)
        paths = {"layers.mlp": "tiled_experts"}
        assert tiling_paths(Llama(CONFIG, scope=scope, rngs=nnx.Rngs(0))) == (
            paths if scope == "mlp" else {"layers": "tiled_block"}
        )
        assert tiling_paths(model) == paths | ({"layers": f"mlp: {reason}"} if scope == "block" else {})
        if scope == "block":
            with pytest.warns(UserWarning, match=f"^Llama: scope='block' tiles the MLP .* where {reason}"):
                logits.append(model(tokens))
        else:
            logits.append(model(tokens))
    assert jnp.array_equal(*logits)

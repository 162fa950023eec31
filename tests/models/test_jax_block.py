"""The Flax decoder with scope="block", all but attention tiled: derivatives, products, bytes and meshes of its layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.config import Checkpointing, ParallelConfig, TensorParallel
from shared_specs.layers.block_costs import block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, MODEL_FLOAT32, limit
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.core.jax_program import counted
from tests.plans.jax_parallel_models import QUICKLY, mesh_of
from tests.tiny_model import tiny_config, tiny_weights
from tiled_jax.layers import attention_blocks
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.mlp.steps import XLA
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss, to_hf
from tiled_jax.models.block.function import block_layer
from tiled_jax.models.block.steps import LayerSteps
from tiled_jax.models.layer import DecoderLayer
from tiled_jax.models.rope import rotary_angles, turning
from tiled_jax.parallel import parallelize

CONFIG = LlamaConfig.from_hf(tiny_config(mlp_bias=True, attention_bias=True))
NORMED = replace(CONFIG, head_norms=True)  # as in Qwen3
# As in Gemma 2 and 3 together.
GEMMA = replace(NORMED, branch_norms=True, norm_offset=1.0, attention_scale=0.5, attention_softcap=2.0)
MERGES = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)  # XLA on CPUs drops barriers there
RATIOS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
KEY_SUMS = 2 * 4 * 8 * 4  # bytes a token of float32 sums of dk and dv
RULE = "and XLA of jax 0.10 merges what is computed again with the forward"


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 8, "gpu": 8})


def layer_of(shard_tokens: int, config: LlamaConfig = CONFIG) -> tuple[nnx.GraphDef, nnx.State]:
    """A layer in float64, no parameter zero."""

    def build() -> DecoderLayer:
        mlp = TiledMLP(32, 64, bias=True, tiling=Tiling(shard_tokens=shard_tokens), dtype=jnp.float64, rngs=nnx.Rngs(0))
        return DecoderLayer(config, mlp=mlp, dtype=jnp.dtype("float64"), rngs=nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(build))
    random = np.random.default_rng(0)
    return graph, jax.tree.map(lambda a: jnp.asarray(0.5 * random.standard_normal(a.shape)), state)


def both(graph: nnx.GraphDef, sequences: int, tokens: int) -> list[Callable[..., jax.Array]]:
    """The layer as it is and a shard at a time: fn(parameters, x)."""
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    return [
        lambda p, x: nnx.merge(graph, p)(x, rotary_angles(CONFIG.rope, CONFIG.head_dim, tokens)),
        lambda p, x: block_layer(nnx.merge(graph, p), x, positions, sequences),
    ]


def quickly(fn: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(fn).lower(*arguments).compile(QUICKLY)(*arguments)


def rows(count: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, 32)))


def y_and_gradients(fn: Any, p: nnx.State, x: jax.Array, dy: jax.Array) -> Any:
    y, pull = jax.vjp(fn, p, x)
    return y, pull(dy)


def assert_same(found: Any, expected: Any, allowed: float = DISTRIBUTED_FLOAT64) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert_within(np.asarray(a), np.asarray(b), allowed, "block")


# Sequences, tokens, tokens of a shard: ragged shards and blocks, shards over the end of a sequence, one shard.
@pytest.mark.parametrize(
    ("sequences", "tokens", "shard"), [(2, 21, 16), pytest.param(1, 40, 7, marks=pytest.mark.slow), (1, 5, 64)]
)
def test_gradients_of_a_layer(sequences: int, tokens: int, shard: int, float64: None) -> None:
    graph, p = layer_of(shard)
    x, dy = rows(sequences * tokens, 1), rows(sequences * tokens, 2)
    plain, block = (quickly(partial(y_and_gradients, fn), p, x, dy) for fn in both(graph, sequences, tokens))
    assert_same(block, plain)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("config", [NORMED, GEMMA], ids=["norms of heads", "of branches, caps"])
def test_gradients_of_a_layer_with_more_norms(config: LlamaConfig, float64: None) -> None:
    graph, p = layer_of(16, config)
    x, dy = rows(2 * 21, 1), rows(2 * 21, 2)
    plain, block = (quickly(partial(y_and_gradients, fn), p, x, dy) for fn in both(graph, 2, 21))
    assert_same(block, plain)


def test_two_documents_in_one_sequence_are_two_sequences(float64: None) -> None:
    """Blocks of eight tokens and shards of five, both over the seam behind the sixth: no query sees the other document."""
    graph, p = layer_of(5)
    places, seam = jnp.tile(jnp.arange(6, dtype=jnp.int32), 2), jnp.repeat(jnp.array([[0, 6]], jnp.int32), 6, axis=1)

    def y_and_dx(x: jax.Array, dy: jax.Array, given: Any) -> Any:
        y, pull = jax.vjp(lambda x: block_layer(nnx.merge(graph, p), x, places, *given), x)
        return y, pull(dy)

    apart, packed = (quickly(partial(y_and_dx, given=given), rows(12, 1), rows(12, 2)) for given in ((2,), (1, seam)))
    assert_same(packed, apart)


@pytest.mark.deep
def test_scales_of_norms_are_not_rounded_for_each_shard() -> None:
    """A shard's part of their gradients is float32, whatever the scales are."""
    config, random = NORMED, np.random.default_rng(0)
    steps = LayerSteps(config, jnp.dtype("bfloat16"), XLA)
    shapes = {"s_attention": 32, "s_mlp": 32, "s_q": 8, "s_k": 8, "w_q": (32, 32), "w_k": (32, 16), "w_v": (32, 16)}
    shapes |= {"w_o": (32, 32), "w_gate": (32, 64), "w_up": (32, 64), "w_down": (64, 32)}
    w = {name: jnp.asarray(0.5 * random.standard_normal(shape), jnp.bfloat16) for name, shape in shapes.items()}
    w["turns"] = turning(config.rope, config.head_dim, jnp.arange(5))
    sums = {name: jnp.zeros(shapes[name], jnp.float32) for name in shapes if name.startswith("s_")}
    x, a = (jnp.asarray(random.standard_normal((5, 32)), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    d = {name: jnp.asarray(random.standard_normal((5, w[f"w_{name}"].shape[1]))) for name in "qkv"}
    _, found = steps.before_gradients(x, jnp.arange(5), d, w, sums)
    found |= steps.behind_gradients(x, a, x, w, {"s_mlp": sums["s_mlp"]})[3]
    for name, total in found.items():
        assert total.dtype == jnp.float32
        assert not np.array_equal(total, total.astype(jnp.bfloat16).astype(jnp.float32)), name


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, NORMED, GEMMA], ids=["llama", "norms of heads", "of branches, caps"])
def test_forward_mode_and_second_order(config: LlamaConfig, float64: None) -> None:
    graph, p = layer_of(7, config)
    x, dy = rows(20, 1), rows(20, 2)

    def derivatives(fn: Any) -> Any:
        def squares(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(jax.grad(lambda x: jnp.sum(fn(p, x) * dy))(x)))

        return jax.jvp(fn, (p, x), (jax.tree.map(jnp.ones_like, p), dy)), jax.grad(squares)(x)

    plain, block = (quickly(partial(derivatives, fn)) for fn in both(graph, 1, 20))
    assert_same(block, plain)


def loaded(config: dict[str, Any], **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    build = lambda: Llama(LlamaConfig.from_hf(config), **options, rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    return graph, from_hf(parameters, tiny_weights(config))


@cache
def loss_and_gradients(**options: Any) -> tuple[float, dict[str, np.ndarray]]:
    config = tiny_config(model_type="qwen2")
    graph, parameters = loaded(config, **options)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config["vocab_size"], (2, 28)), jnp.int32)
    loss = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), tokens.at[1, 20:].set(-100)))
    value, gradients = quickly(loss, parameters)
    return float(value), to_hf(gradients)


TILED: dict[str, Any] = {"scope": "block", "tiling": Tiling(shard_tokens=10)}


@pytest.mark.parametrize(
    "checkpointing",
    [
        pytest.param(False, id="kept"),
        pytest.param(True, id="full", marks=pytest.mark.slow),
        pytest.param(Checkpointing(mode="products"), id="products", marks=pytest.mark.slow),
    ],
)
def test_a_model_equals_the_plain_one(checkpointing: Any) -> None:
    """Whose rows end in -100."""
    (expected_loss, expected), (loss, found) = (
        loss_and_gradients(**o) for o in ({"plain": True}, TILED | {"checkpointing": checkpointing})
    )
    assert loss == pytest.approx(expected_loss, rel=MODEL_FLOAT32)
    for name, gradient in found.items():
        assert_within(gradient, expected[name], MODEL_FLOAT32, name)


@pytest.mark.deep
def test_a_bfloat16_model_errs_no_more_than_the_plain_one() -> None:
    _, exact = loss_and_gradients(plain=True)
    _, plain = loss_and_gradients(plain=True, dtype="bfloat16")
    _, found = loss_and_gradients(**TILED, dtype="bfloat16")
    for name, gradient in found.items():
        size = np.linalg.norm(exact[name])
        error = float(np.linalg.norm(plain[name] - exact[name]) / size)
        assert_within(gradient, exact[name], limit(error, "bfloat16"), name)


def shapes_of(layers: int, dtype: str = "float32", checkpointing: bool = False, kind: str = "llama") -> Any:
    """loss and gradients, and the parameters' shapes, of a model with the ratios of Llama-3-8B."""
    config = LlamaConfig.from_hf(
        tiny_config(**RATIOS, model_type=kind, head_dim=8, num_hidden_layers=layers, vocab_size=256)
    )
    options: Any = {"scope": "block", "tiling": Tiling(shard_tokens=32), "checkpointing": checkpointing}
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, **options, rngs=nnx.Rngs(0))))
    return jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens)), parameters


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("llama", False), ("llama", True), ("qwen3", True), ("phi3", False), ("gemma2", False)],
)
def test_products_of_a_layer_are_made_once_in_forward_and_once_in_backward(kind: str, checkpointing: bool) -> None:
    """And none a third time: four of q, k, v, o, gate and up, one of which forward's, and three of down. To the FLOP.

    Where heads are normed q and k alone are made again for their norms' gradients, where branches are the product of down.

    The difference of two depths is one layer, which has no part of the loss.
    """
    T, H, I, K, block = 64, 128, 448, 32, 8  # noqa: E741
    tokens = jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    one, two = (flop(*shapes_of(layers, checkpointing=checkpointing, kind=kind), tokens) for layers in (1, 2))
    linears = 4 * (2 * H * H + 2 * H * K) + (4 + 4 + 3) * H * I
    linears += (H * H + H * K) * (kind == "qwen3") + H * I * (kind == "gemma2")
    pairs = (T // block) * (T // block + 1) // 2
    # q k^T and the product with v twice, and five products in backward, for every pair of blocks.
    attention = (2 + 2 + 5) * pairs * block * block * H
    assert two - one == 2 * (T * linears + attention)


@pytest.mark.skipif(MERGES, reason="counted in what XLA compiles, " + RULE)
def test_products_of_the_compiled_program() -> None:
    T = 64
    fn, parameters = shapes_of(1)
    tokens = jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    text = jax.jit(fn).lower(parameters, tokens).compile().as_text()
    loss_shards = T // 32  # of tokens that all have a label, which the program does not know
    assert 2 * counted(text, turns=loss_shards)[2] == flop(fn, parameters, tokens)


@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_a_token(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At two lengths and two depths: the layers' inputs, which may wait in host memory, and at most seven arrays [T, H].

    Of so few tokens a shard of the MLP is the highest point, where there are no sums of gradients of keys and values yet.
    """
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 32})
    found = {}
    for layers in (2, 4):
        sizes = [
            temp_bytes(*shapes_of(layers, dtype), jax.ShapeDtypeStruct((1, T + 1), jnp.int32)) for T in (1024, 2048)
        ]
        found[layers] = (sizes[1] - sizes[0]) / 1024
    itemsize = jnp.dtype(dtype).itemsize
    predicted = partial(block_row_bytes, hidden=128, heads=16, kv_heads=4, head_dim=8, itemsize=itemsize)
    for layers, a_token in found.items():
        assert a_token == pytest.approx(predicted(kept_layers=layers) - KEY_SUMS, rel=COST_BYTES)
        assert a_token - layers * 128 * 4 <= 7 * 128 * 4
    assert found[4] - found[2] == pytest.approx(2 * 128 * 4, rel=COST_BYTES)


@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
def test_bytes_a_token_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens its backward is the highest point."""
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 32})
    short, long = (temp_bytes(*shapes_of(2), jax.ShapeDtypeStruct((1, T + 1), jnp.int32)) for T in (16384, 32768))
    predicted = block_row_bytes(hidden=128, heads=16, kv_heads=4, head_dim=8, itemsize=4, kept_layers=2)
    assert (long - short) / 16384 == pytest.approx(predicted, rel=COST_BYTES)


@pytest.mark.deep
def test_projections_that_are_one_parameter_are_kept_as_one() -> None:
    """Without recomputation: of no layer a copy of its weights waits for backward."""
    found = {}
    for kind in ("llama", "phi3"):
        sizes = [
            temp_bytes(*shapes_of(layers, kind=kind), jax.ShapeDtypeStruct((1, 9), jnp.int32)) for layers in (2, 4)
        ]
        found[kind] = sizes[1] - sizes[0]
    assert found["phi3"] - found["llama"] < 2 * 4 * 3 * 128 * 448 // 10, found


def assert_reduced_once(fn: Callable[..., jax.Array], p: nnx.State, devices: int) -> None:
    """Of a layer whose sequences of twelve tokens some devices share, under plain jit: derivatives are as on one, and no
    collective is inside of a loop."""
    x, dy = rows(devices * 12, 1), rows(devices * 12, 2)
    expected = quickly(partial(y_and_gradients, fn), p, x, dy)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, dy))
    p = jax.device_put(p, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        step = jax.jit(partial(y_and_gradients, fn)).lower(p, x, dy).compile()
        found = step(p, x, dy)
    outside, inside, _ = counted(step.as_text())
    assert_same(found, expected)
    assert not inside
    assert outside["all-gather"] == 0
    assert outside["all-reduce"] <= len(jax.tree.leaves(p))


@pytest.mark.ranks
def test_sequences_over_a_mesh_reduce_every_gradient_once(float64: None) -> None:
    graph, p = layer_of(4)
    assert_reduced_once(both(graph, 8, 12)[1], p, 8)


def over_columns(sequence_parallel: bool, config: LlamaConfig = CONFIG) -> list[Any]:
    """Of the layer as it is, a shard at a time, and over two devices that split its weights y and gradients; its operands."""
    sequences, tokens, shard = 2, 24, 8
    graph, p = layer_of(shard, config)
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    options: Any = {"tensor": "tp", "sequence_parallel": sequence_parallel}
    columns, rows_of_weights = {"q", "k", "v", "w_gate", "w_up", "b_gate", "b_up"}, {"o", "w_down"}

    def spec(path: Any, leaf: nnx.Variable) -> P:
        names = {*map(str, path)}
        if "bias" in names and "o" in names:
            return P()
        ndim = leaf.get_value().ndim
        return P(*[None] * (ndim - 1), "tp") if names & columns else P("tp", None) if names & rows_of_weights else P()

    specs = nnx.map_state(spec, p)
    of_rows = P("tp", None) if sequence_parallel else P()
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.shard_map(
        lambda p, x: block_layer(nnx.merge(graph, p), x, positions, sequences, **options),
        mesh=mesh,
        in_specs=(specs, of_rows),
        out_specs=of_rows,
    )
    operands = p, rows(sequences * tokens, 1), rows(sequences * tokens, 2)
    return [*(partial(y_and_gradients, fn) for fn in (*both(graph, sequences, tokens), split)), operands]


@pytest.mark.deep_but(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sequence_parallel", "config"),
    [
        (True, CONFIG),
        (False, CONFIG),
        pytest.param(True, NORMED, marks=pytest.mark.slow),
        (True, GEMMA),
        (False, GEMMA),
    ],
)
def test_a_layer_whose_weights_are_split(sequence_parallel: bool, config: LlamaConfig, float64: None) -> None:
    """Derivatives as on one device. In each of the loops over shards rows enter products and sums are handed back: of q, k and
    v, of attention's output, of gate and up, of down's; in backward again but for down's, for which a norm alone asks,
    and the gradients of each."""
    plain, whole, split, operands = over_columns(sequence_parallel, config)
    step = jax.jit(split).lower(*operands).compile(QUICKLY)
    _, inside, _ = counted(step.as_text())
    again = config.branch_norms  # all-reduces of down's are else one, behind the loops
    expected = (
        {"all-gather": 2 + 5, "reduce-scatter": 2 + 3 + again} if sequence_parallel else {"all-reduce": 3 + 2 * again}
    )
    assert dict(inside) == expected
    assert_same(step(*operands), quickly(plain, *operands))
    # As many products as on one device, of half of the columns each.
    assert 2 * flop(split, *operands) == flop(whole, *operands)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
def test_bytes_a_token_of_split_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two lengths, of a device that has half of the columns and of the rows."""
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 32})
    config = LlamaConfig.from_hf(tiny_config(**RATIOS, head_dim=8, num_hidden_layers=2, vocab_size=256))
    options: Any = {"scope": "block", "tiling": Tiling(shard_tokens=32)}
    model = nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0)))
    plan = parallelize(model, mesh_of(tp=2), ParallelConfig(tensor=TensorParallel()))
    batches = (jax.ShapeDtypeStruct((1, T + 1), jnp.int32) for T in (1024, 2048))
    programs = [plan.gradients.lower(plan.shapes.parameters, batch).compile() for batch in batches]
    short, long = (program.memory_analysis().temp_size_in_bytes for program in programs)
    sizes = {"hidden": 128, "heads": 16, "kv_heads": 4, "head_dim": 8, "itemsize": 4}
    predicted = block_row_bytes(**sizes, kept_layers=2, tensor=2) - KEY_SUMS // 2
    assert (long - short) / 1024 == pytest.approx(predicted, rel=COST_BYTES)


@pytest.mark.ranks
def test_axes_that_are_in_the_types_are_refused(float64: None) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    graph, p = layer_of(4)
    x = jax.device_put(rows(16, 1), NamedSharding(mesh, P("data")))
    text = r"^Llama: the axes of the mesh must be of axis type Auto with scope='block', got Explicit\. Call it under parall"
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=text):
        jax.eval_shape(both(graph, 8, 2)[1], p, x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scope": "layer"}, SpecError, "scope must be 'mlp' or 'block', got 'layer'"),
        ({"scope": "block", "plain": True}, SpecError, "scope must be 'mlp' with plain=True, got 'block'"),
        *(
            (
                {"scope": "block", "tiling": tiling},
                UnsupportedError,
                f"{name} must be {default} with scope='block', got",
            )
            for name, default, tiling in (
                ("keep", "0.0", Tiling(keep=0.5)),
                ("memory_budget", "None", Tiling(memory_budget=2**30)),
                ("deterministic", "False", Tiling(deterministic=True)),
                ("token_axes", "None", Tiling(token_axes="data")),
            )
        ),
    ],
)
def test_what_a_block_does_not_have_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Llama: {message}"):
        Llama(CONFIG, **options, rngs=nnx.Rngs(0))

"""The Flax decoder: attention in blocks, names and layouts of weights, tiled against plain, compiled bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.tolerances import FLOOR, MODEL_FLOAT32
from tests.asserting import assert_within
from tests.core.jax_counting import temp_bytes
from tests.tiny_model import tiny_config, tiny_weights
from tiled_jax import TiledMLP
from tiled_jax.layers import attention
from tiled_jax.models import Llama, LlamaConfig, causal_attention, from_hf, next_token_loss, to_hf
from tiled_jax.models.layer import Attention
from tiled_jax.models.mlp import PlainMLP
from tiled_jax.models.rope import rotary_angles

SMOLLM2 = tiny_config(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
)
GIB = 2**30


def whole_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """All scores at once, every key head repeated: what the blocks have to equal."""
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    seen = jnp.tril(jnp.ones((tokens, tokens), bool))
    if window is not None:
        seen &= jnp.triu(jnp.ones((tokens, tokens), bool), 1 - window)
    if mask is not None:
        seen = seen & (mask[:, None, None, :] | jnp.eye(tokens, dtype=bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v)


def heads(tokens: int, dtype: Any = np.float64, batch: int = 2) -> list[jax.Array]:
    """q, k, v and dy."""
    random = np.random.default_rng(tokens)
    return [jnp.asarray(random.standard_normal((batch, tokens, n, 8)), dtype=dtype) for n in (6, 2, 2, 6)]


def y_and_gradients(fn: Any) -> Any:
    def run(*arguments: Any) -> Any:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, pull(arguments[-1])

    return jax.jit(run)


@pytest.mark.parametrize(
    ("tokens", "block"),
    [(1, None), (5, None), (64, 8), (70, 64), (7, 8), (11, 1), (81, 4)],
)
def test_attention_in_blocks(same: Any, tokens: int, block: int | None) -> None:
    def blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(q, k, v, block_tokens=block)

    inputs = heads(tokens)
    same(y_and_gradients(blocks)(*inputs), y_and_gradients(whole_attention)(*inputs))


PADDED = np.arange(70) % 9 > 1


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (8, {"window": 5}),
        (8, {"window": 1, "scale": 0.3}),
        (16, {"window": 30, "softcap": 0.7, "mask": PADDED}),
        (64, {"window": 69}),
        (8, {"mask": PADDED, "softcap": 0.7}),
    ],
    ids=["window", "itself", "all", "nearly all", "mask"],
)
def test_windows_masks_and_caps_in_blocks(same: Any, block: int, options: dict[str, Any]) -> None:
    options = options | ({"mask": jnp.asarray(np.stack((PADDED, ~PADDED)))} if "mask" in options else {})
    inputs = heads(70)
    blocks = y_and_gradients(lambda q, k, v: causal_attention(q, k, v, block_tokens=block, **options))
    same(blocks(*inputs), y_and_gradients(lambda q, k, v: whole_attention(q, k, v, **options))(*inputs))


def test_keys_outside_of_a_window_are_not_multiplied() -> None:
    """The scores of a block of queries are of as many keys as it sees together, in forward and backward."""
    shapes = [jax.ShapeDtypeStruct((1, 1024, n, 8), jnp.float32) for n in (4, 4, 4, 4)]

    def longest(**options: Any) -> int:
        run = y_and_gradients(lambda q, k, v: causal_attention(q, k, v, block_tokens=64, **options))
        return max(array.size for array in _scores_of(jax.make_jaxpr(run)(*shapes).jaxpr))

    assert longest(window=65) == 4 * 64 * 128
    assert longest() == 4 * 64 * 1024


def _scores_of(jaxpr: Any) -> Any:
    """Results of every exponential, which are arrays of scores, in all programs within a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "exp":
            yield from (out.aval for out in equation.outvars)
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda a: hasattr(a, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _scores_of(inner)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_attention_adds_key_gradients_in_float32(dtype: str) -> None:
    """Many blocks of 16-bit queries err no more than one block does."""
    inputs = heads(512, dtype, batch=1)
    exact = y_and_gradients(whole_attention)(*(a.astype(jnp.float32) for a in inputs))

    def errors(block: int) -> list[float]:
        found = y_and_gradients(lambda *a: causal_attention(*a, block_tokens=block))(*inputs)
        assert all(a.dtype == dtype for a in jax.tree.leaves(found))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return [float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs]

    for many, one in zip(errors(4), errors(512), strict=True):
        assert many <= one + FLOOR[dtype]


def test_attention_blocks_shrink_with_the_scores() -> None:
    assert attention._block_tokens(1, 16384, 9) == attention.QUERY_BLOCK_TOKENS
    short = attention._block_tokens(8, 131072, 32)
    assert short < attention.QUERY_BLOCK_TOKENS
    assert attention._block_tokens(1, 5, 9) == 5


def attention_gradient(fn: Any, tokens: int) -> int:
    shapes = [jax.ShapeDtypeStruct((1, tokens, n, 64), jnp.float32) for n in (9, 3, 3, 9)]
    return temp_bytes(y_and_gradients(fn), *shapes)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=[pytest.mark.slow, pytest.mark.figures])])
def test_bytes_of_one_layers_attention_at_16384_tokens(dtype: str) -> None:
    """Projections, rotation, attention and all their gradients, in the shapes of SmolLM2-135M."""
    config, kind = LlamaConfig.from_hf(SMOLLM2), jnp.dtype(dtype)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Attention(config, dtype=kind, rngs=nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((16384, config.hidden_size), kind)

    def layer(parameters: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters)(x, rotary_angles(config.rope, config.head_dim, 16384))

    assert temp_bytes(y_and_gradients(layer), parameters, x, x) <= GIB


def test_bytes_of_attention_in_one_piece_show_that_the_meter_sees_them() -> None:
    assert attention_gradient(whole_attention, 4096) >= 9 * 4096**2 * 4
    assert attention_gradient(causal_attention, 4096) < GIB / 8


def loaded(config: dict[str, Any], **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    build = lambda: Llama(LlamaConfig.from_hf(config), **options, rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    return graph, from_hf(parameters, tiny_weights(config))


def loss_and_gradients(config: dict[str, Any], **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    graph, parameters = loaded(config, **options)
    assert isinstance(nnx.merge(graph, parameters).layers.mlp, PlainMLP if options.get("plain") else TiledMLP)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config["vocab_size"], (2, 50)), jnp.int32)
    loss = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), tokens)))
    value, gradients = loss(parameters)
    return float(value), to_hf(gradients)


@pytest.fixture(scope="module", params=[False, True], ids=["tied", "untied-biases"])
def plain(request: pytest.FixtureRequest) -> Any:
    """A configuration with the loss and gradients of the untiled model."""
    bias = request.param
    config = tiny_config(mlp_bias=bias, attention_bias=bias, tie_word_embeddings=not bias)
    return config, *loss_and_gradients(config, plain=True)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "options",
    [
        {"tiling": Tiling(shard_tokens=7, keep=0.5)},
        {"tiling": Tiling(num_shards=3), "checkpointing": True},
    ],
    ids=["keep", "checkpointing"],
)
def test_tiled_equals_plain(plain: Any, options: dict[str, Any]) -> None:
    config, expected_loss, expected = plain
    loss, gradients = loss_and_gradients(config, **options)
    assert loss == pytest.approx(expected_loss, rel=MODEL_FLOAT32)
    assert gradients.keys() == expected.keys() == tiny_weights(config).keys()
    for name, gradient in gradients.items():
        assert_within(gradient, expected[name], MODEL_FLOAT32, name)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    graph, parameters = loaded(tiny_config())
    model = nnx.merge(graph, parameters)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 272, (3, 20)), jnp.int32)
    logits = np.asarray(model(tokens[:, :-1]), np.float64)
    assert logits.shape == (3, 19, 272)
    odds = np.exp(logits)
    targets = np.asarray(tokens)[:, 1:, None]
    expected = -np.log(np.take_along_axis(odds / odds.sum(-1, keepdims=True), targets, -1)).mean()
    assert float(next_token_loss(model, tokens)) == pytest.approx(expected, rel=MODEL_FLOAT32)


@pytest.mark.deep
@pytest.mark.parametrize("plain", [False, True], ids=["tiled", "plain"])
def test_rows_that_end_in_padding_have_the_loss_and_gradients_of_shorter_rows(plain: bool) -> None:
    graph, parameters = loaded(tiny_config(), plain=plain)
    loss = jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens))
    tokens = np.random.default_rng(1).integers(0, 272, (2, 20)).astype(np.int32)
    padded = tokens.copy()
    padded[1, 12:] = -100
    found, gradients = loss(parameters, jnp.asarray(padded))
    whole, short = loss(parameters, jnp.asarray(tokens[:1])), loss(parameters, jnp.asarray(tokens[1:, :12]))
    total, of_whole, of_short = 19 + 11, *(jax.tree.leaves(gradient) for _, gradient in (whole, short))
    expected = (19 * float(whole[0]) + 11 * float(short[0])) / total
    assert float(found) == pytest.approx(expected, rel=MODEL_FLOAT32)
    for a, b, c in zip(jax.tree.leaves(gradients), of_whole, of_short, strict=True):
        assert_within(np.asarray(a), (19 * np.asarray(b) + 11 * np.asarray(c)) / total, MODEL_FLOAT32, "gradient")


def model_bytes(tokens: int, **options: Any) -> int:
    """Temporary bytes of loss and gradients of four layers of SmolLM2-135M."""
    config = LlamaConfig.from_hf(SMOLLM2 | {"vocab_size": 256})
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0))))
    loss = jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens))
    return temp_bytes(loss, parameters, jax.ShapeDtypeStruct((1, tokens + 1), jnp.int32))


def test_bytes_of_the_model() -> None:
    """Tiling spares the [tokens, intermediate] arrays of every layer, checkpointing all but its input."""
    plain, tiled, checkpointed = (model_bytes(4096, **o) for o in ({"plain": True}, {}, {"checkpointing": True}))
    assert plain - tiled >= 4 * 2 * 4096 * 1536 * 4
    assert tiled - checkpointed >= 4 * 4 * 4096 * 576 * 4


def test_bytes_of_the_loss_are_one_array_of_logits() -> None:
    config = LlamaConfig.from_hf(SMOLLM2 | {"num_hidden_layers": 1})
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    loss = jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens))
    found = temp_bytes(loss, parameters, jax.ShapeDtypeStruct((1, 2049), jnp.int32))
    assert found < 1.5 * 2048 * config.vocab_size * 4


@pytest.mark.parametrize("tied", [True, False])
def test_weights_go_round(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    weights = tiny_weights(config)
    _, parameters = loaded(config)
    found = to_hf(parameters)
    assert found.keys() == weights.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


def test_weights_are_copied() -> None:
    config = tiny_config()
    _, parameters = nnx.split(nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config), rngs=nnx.Rngs(0))))
    weights = tiny_weights(config)
    parameters = from_hf(parameters, weights)
    for array in weights.values():
        array[:] = 7
    assert not any((array == 7).any() for array in to_hf(parameters).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "with model.layers.1.mlp.up_proj.weight"),
        (lambda w: w.update(extra=np.zeros(3, np.float32)), "no parameter for, got extra"),
        (
            lambda w: w.update({"model.layers.0.mlp.down_proj.weight": np.zeros((64, 32), np.float32)}),
            r"must be \[32, 64\], got \[64, 32\]",
        ),
        (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}), "got lm_head.weight"),
    ],
    ids=["missing", "unknown", "transposed", "head of a tied model"],
)
def test_wrong_weights_are_refused(change: Any, message: str) -> None:
    config = tiny_config()
    _, parameters = nnx.split(nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config), rngs=nnx.Rngs(0))))
    weights = tiny_weights(config)
    change(weights)
    with pytest.raises(SpecError, match=message):
        from_hf(parameters, weights)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "tanh"}, UnsupportedError, "hidden_act must be one of silu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, UnsupportedError, "rope_type must be one of .*got 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, SpecError, "rope_parameters must be .* with factor,"),
        ({"model_type": "gemma"}, UnsupportedError, "model_type must be one of llama, mistral, qwen2, .*, got 'gemma'"),
        ({"attention_dropout": 0.1}, UnsupportedError, "attention_dropout must be false, 0 or left out, got 0.1"),
        ({"num_key_value_heads": 3}, SpecError, "a divisor of num_attention_heads=4, got 3"),
        ({"head_dim": 7}, SpecError, "head_dim must be even"),
        ({"hidden_size": None}, SpecError, "hidden_size must be an integer >= 1, got None"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor must be 1 or left out, got 0.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, SpecError, "rope_parameters must be .* with factor"),
    ],
)
def test_configurations_it_cannot_do_are_refused(changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^LlamaConfig.from_hf: .*{message}"):
        LlamaConfig.from_hf(tiny_config() | changes)


def test_older_spelling_of_the_configuration() -> None:
    new = tiny_config(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "head_dim")}
    old |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_hf(old) == LlamaConfig.from_hf(new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plain": True, "tiling": Tiling()}, "Llama: tiling must be None with plain=True"),
        ({"dtype": "int8"}, "Llama: dtype must be one of float32, bfloat16, float16, float64, got int8"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        Llama(LlamaConfig.from_hf(tiny_config()), **options, rngs=nnx.Rngs(0))


def test_float64_needs_arrays_of_it() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^Llama: dtype must be of 32 bits or fewer here, got float64\. Set jax_enable_x64"
    ):
        Llama(LlamaConfig.from_hf(tiny_config()), dtype="float64", rngs=nnx.Rngs(0))


def test_a_fresh_model_is_random_in_every_layer() -> None:
    model = Llama(LlamaConfig.from_hf(tiny_config()), rngs=nnx.Rngs(0))
    first, second = model.layers.mlp.w_up[...]
    assert not np.array_equal(first, second)
    assert np.asarray(first).std() > 0

"""The families of decoder in JAX alone: padding and documents, scope="block", what is refused, and in which words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.app.models.model_config import complete_config
from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from shared_specs.tolerances import FLOOR, MODEL_FLOAT32, limit
from tests.asserting import assert_within, relative_error
from tests.models.families import FAMILIES, SIZES, VOCAB
from tests.tiny_model import tiny_weights
from tiled_jax.models import Llama, LlamaConfig, from_hf, generate, next_token_loss
from tiled_jax.models.loss import summed_next_token_loss
from tiled_jax.plans.api import parallelize

IDS = np.random.default_rng(0).integers(1, VOCAB, (2, 12)).astype(np.int32)
# Families whose layers differ in scope="block".
BLOCKS = (
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-long",
    "smollm3",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-unnormalised",
)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return complete_config(SIZES | FAMILIES[family] | changes, family)


def built(family: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    config = config_of(family, **changes or {})
    graph, parameters = nnx.split(
        nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config), **options, rngs=nnx.Rngs(0)))
    )
    return graph, from_hf(parameters, tiny_weights(config))


def loss_and_gradients(graph: nnx.GraphDef, parameters: nnx.State, **given: Any) -> Any:
    loss = lambda p: nnx.merge(graph, p)(jnp.asarray(IDS), **given, labels=jnp.asarray(IDS))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(parameters)


def assert_equal(found: Any, expected: Any, allowed: float) -> None:
    leaves = [jax.tree.leaves(each) for each in (found, expected)]
    for index, (a, b) in enumerate(zip(*leaves, strict=True)):
        assert_within(np.asarray(a), np.asarray(b), allowed, f"leaf {index}")


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_products_leave_gradients_in_float32(family: str) -> None:
    """Of shapes alone: under strict promotion a dtype that is mixed by mistake is an error."""
    graph, parameters = built(family, dtype="bfloat16")
    ids = jnp.asarray(IDS)
    loss, gradients = jax.eval_shape(
        jax.value_and_grad(lambda p: nnx.merge(graph, p)(ids, attention_mask=ids, labels=ids)), parameters
    )
    assert {a.dtype for a in (loss, *jax.tree.leaves(gradients))} == {jnp.dtype("float32")}
    assert jax.eval_shape(lambda p: nnx.merge(graph, p)(ids), parameters).dtype == jnp.bfloat16
    tokens = jax.eval_shape(lambda p: generate(nnx.merge(graph, p), ids, 3, attention_mask=ids), parameters)
    assert (tokens.shape, tokens.dtype) == ((2, 15), jnp.int32)


def with_wide_parameters(family: str, **options: Any) -> tuple[nnx.GraphDef, nnx.State, nnx.GraphDef, nnx.State]:
    """A model with parameters of 16 bits, and one of float32 parameters of the same values."""
    graph, parameters = built(family, dtype="bfloat16", param_dtype="bfloat16", **options)
    dtypes = {(path[-1] == "scale", leaf.get_value().dtype.name) for path, leaf in nnx.to_flat_state(parameters)}
    assert dtypes == {(True, "float32"), (False, "bfloat16")}
    wide, _ = built(family, dtype="bfloat16", **options)
    return graph, parameters, wide, jax.tree.map(lambda a: a.astype(jnp.float32), parameters)


def assert_rounded(a: jax.Array, b: jax.Array) -> None:
    """a, of 16 bits, is b to within what rounding costs."""
    a, b, rounded = (np.asarray(each, np.float32) for each in (a, b, b.astype(a.dtype)))
    assert_within(a, b, limit(relative_error(rounded, b), "bfloat16"), "a gradient of 16 bits")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"scope": "block"}),
        ("mixtral", {"scope": "block"}),
        ("mixtral", {}),
        ("phi3-long", {"scope": "block"}),
        ("gemma2", {}),
        ("smollm3", {"plain": True}),
    ],
    ids=["block", "block-experts", "experts", "fused", "tied", "plain"],
)
def test_gradients_of_16_bit_parameters_are_rounded_once(family: str, options: dict[str, Any]) -> None:
    """To the bit those of float32 parameters of these values, rounded; of a tied table two, rounded, are added."""
    graph, parameters, wide, of_wide = with_wide_parameters(family, **options)
    loss, gradients = loss_and_gradients(graph, parameters)
    expected, wide_gradients = loss_and_gradients(wide, of_wide)
    assert loss.dtype == jnp.float32
    assert loss == expected
    tied = nnx.merge(graph, parameters).head is None
    for (path, found), (_, of_path) in zip(*map(nnx.to_flat_state, (gradients, wide_gradients)), strict=True):
        a, b = found.get_value(), of_path.get_value()
        assert a.dtype == (jnp.float32 if path[-1] == "scale" else jnp.bfloat16)
        if path[0] == "embed" and tied:
            assert_rounded(a, b)
        else:
            assert jnp.array_equal(a, b.astype(a.dtype)), path
    tokens = [generate(nnx.merge(*each), jnp.asarray(IDS), 3) for each in ((graph, parameters), (wide, of_wide))]
    assert jnp.array_equal(*tokens)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("tensor", [False, True], ids=["context", "tensor"])
def test_16_bit_parameters_over_a_mesh(tensor: bool) -> None:
    """The residual stream stays float32: the loss is to the bit that of float32 parameters of the same values."""
    second = "tp" if tensor else "cp"
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("dp_shard", second))
    config = (
        ParallelConfig(data=DataParallel(), tensor=TensorParallel(axis="tp"))
        if tensor
        else ParallelConfig(data=DataParallel(context_axis="cp"))
    )
    graph, parameters, wide, of_wide = with_wide_parameters("qwen3", scope="block")
    plans = [parallelize(nnx.merge(*each), mesh, config) for each in ((graph, parameters), (wide, of_wide))]
    batch = {"input_ids": IDS, "labels": IDS}
    found, expected = (plan.gradients(plan.state.parameters, batch) for plan in plans)
    assert found[0] == expected[0]
    assert [a.dtype for a in jax.tree.leaves(found[1])] == [a.dtype for a in jax.tree.leaves(parameters)]
    for a, b in zip(*(jax.tree.leaves(each[1]) for each in (found, expected)), strict=True):
        assert_rounded(a, b)


@pytest.mark.parametrize("given", ["int32", "bf16", object()], ids=["integers", "no name", "no dtype"])
def test_a_dtype_that_parameters_cannot_have(given: Any) -> None:
    config = LlamaConfig.from_hf(config_of("mistral"))
    with pytest.raises(SpecError, match=r"^Llama: param_dtype must be one of float32, bfloat16, float16, float64, got"):
        Llama(config, param_dtype=given, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match=r"^Llama: param_dtype must be of 32 bits or fewer here, got float64"):
        Llama(config, param_dtype="float64", rngs=nnx.Rngs(0))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_are_the_layers_with_padding_and_windows(family: str, float64: None) -> None:
    mask = np.ones_like(IDS)
    mask[0, :3] = mask[1, 4:6] = 0
    options = {"dtype": "float64", "tiling": Tiling(shard_tokens=5)}
    expected = loss_and_gradients(*built(family, **options), attention_mask=mask)
    found = loss_and_gradients(*built(family, **options, scope="block"), attention_mask=mask)
    assert_equal(found, expected, FLOOR["float64"])


def test_experts_are_not_split_over_tensor_ranks() -> None:
    model = nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config_of("mixtral")), rngs=nnx.Rngs(0)))
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tp",))
    text = r"^parallelize: the model must be one of one MLP a layer with config\.tensor, got experts\. Take data"
    with pytest.raises(UnsupportedError, match=text):
        parallelize(model, mesh, ParallelConfig(tensor=TensorParallel(axis="tp")))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("scope", "data"),
    [("block", "ulysses"), ("block", "ring"), ("mlp", "ulysses"), ("block", None)],
    ids=["block-ulysses", "block-ring", "mlp", "block-fsdp"],
)
def test_experts_over_a_mesh_are_those_of_one_device(scope: str, data: str | None) -> None:
    """Sequences, and the tokens of each, on devices that have a part of every expert's weights."""
    graph, parameters = built("mixtral")
    tiled, _ = built("mixtral", tiling=Tiling(shard_tokens=3), scope=scope)
    labels = IDS.copy()
    labels[0, :7] = -100
    batch = {"input_ids": IDS, "labels": labels}
    expected = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), batch)))(parameters)
    shape, axes = ((2, 2), ("dp_shard", "cp")) if data else ((2,), ("dp_shard",))
    mesh = Mesh(np.asarray(jax.devices()[: 2 * len(shape)]).reshape(shape), axes)
    context = {"context_axis": "cp", "context": data} if data else {}
    plan = parallelize(nnx.merge(tiled, parameters), mesh, ParallelConfig(data=DataParallel(**context)))
    assert plan.shardings.parameters.layers.mlp.w_gate.get_value().spec[2] in (axes, *axes)
    assert_equal(plan.gradients(plan.state.parameters, batch), expected, MODEL_FLOAT32)


@pytest.mark.deep
def test_a_mesh_shares_the_sequences_of_any_family() -> None:
    """With a loss_fn: parameters are sharded, and the loss is that of one device."""
    graph, parameters = built("mixtral")
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("dp_shard",))
    model, data = nnx.merge(graph, parameters), ParallelConfig(data=DataParallel())
    plan = parallelize(model, mesh, data, loss_fn=summed_next_token_loss)
    labels = IDS.copy()
    labels[0, :7] = -100
    batch = {"input_ids": IDS, "labels": labels}
    expected = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), batch)))(parameters)
    assert_equal(plan.gradients(plan.state.parameters, batch), expected, MODEL_FLOAT32)


@pytest.mark.deep
def test_segments_over_a_mesh_are_those_of_one_device() -> None:
    graph, parameters = built("mistral", {"sliding_window": None})
    data = ParallelConfig(data=DataParallel(context_axis="cp"))
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("dp_shard", "cp"))
    plan = parallelize(nnx.merge(graph, parameters), mesh, data)
    segments = np.asarray([[3] * 5 + [1] * 7, [2] * 12], np.int32)
    batch = {"input_ids": IDS, "labels": IDS, "segment_ids": segments}
    found = plan.gradients(plan.state.parameters, batch)
    assert_equal(found, loss_and_gradients(graph, parameters, segment_ids=segments), MODEL_FLOAT32)


def test_an_attention_mask_is_refused_over_a_mesh() -> None:
    model = nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config_of("mistral")), rngs=nnx.Rngs(0)))
    plan = parallelize(model, Mesh(np.asarray(jax.devices()[:2]), ("dp_shard",)), ParallelConfig(data=DataParallel()))
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": IDS}
    with pytest.raises(UnsupportedError, match=r"^parallelize: batch\['attention_mask'\] must be None over a mesh"):
        plan.gradients.lower(plan.shapes.parameters, batch)


def test_layers_of_two_kinds_are_recomputed_as_asked() -> None:
    expected = loss_and_gradients(*built("gemma2"))
    found = loss_and_gradients(*built("gemma2", checkpointing=Checkpointing(mode="layers", every=2)))
    assert_equal(found, expected, MODEL_FLOAT32)


def test_padding_anywhere_is_as_if_it_were_not_there() -> None:
    """In front, behind, and between: logits of the others are those of the shorter sequence, whatever the padding is."""
    graph, parameters = built("gemma3")
    run = jax.jit(lambda ids, mask, places: nnx.merge(graph, parameters)(ids, places, attention_mask=mask))
    short = IDS[:1, :6]
    places = jnp.arange(6)[None]
    expected = np.asarray(run(jnp.asarray(short), jnp.ones_like(short), places))[0]
    for there in ([3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5, 6]):
        ids, mask = np.full((1, 9), 7, np.int32), np.zeros((1, 9), np.int32)
        ids[0, there], mask[0, there] = short[0], 1
        positions = jnp.maximum(jnp.cumsum(jnp.asarray(mask), axis=1) - 1, 0)
        found = np.asarray(run(jnp.asarray(ids), jnp.asarray(mask), positions))[0]
        assert np.isfinite(found).all()
        wider = slice(None) if there[-1] - there[0] == 5 else slice(0, 2)  # a window counts padding that it spans
        assert_within(found[there][wider], expected[wider], MODEL_FLOAT32, f"logits at {there}")


def test_segments_are_positions_that_restart() -> None:
    graph, parameters = built("smollm3")
    segments = np.asarray([[3] * 5 + [1] * 7, [2] * 12], np.int32)
    places = np.asarray([[*range(5), *range(7)], [*range(12)]], np.int32)
    expected = loss_and_gradients(graph, parameters, position_ids=places)
    assert_equal(loss_and_gradients(graph, parameters, segment_ids=segments), expected, MODEL_FLOAT32)
    # Every document is a sequence by itself, behind which there is padding.
    rows = np.full((3, 12), -100, np.int32)
    for row, document in zip(rows, (IDS[0, :5], IDS[0, 5:], IDS[1]), strict=True):
        row[: len(document)] = document
    apart = jax.jit(lambda p: next_token_loss(nnx.merge(graph, p), {"input_ids": rows, "labels": rows}))(parameters)
    assert float(expected[0]) == pytest.approx(float(apart), rel=MODEL_FLOAT32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"attention_mask": np.ones((2, 3), np.int32)},
            SpecError,
            r"attention_mask must be of shape \[2, 12\] or \[1, 12\]",
        ),
        (
            {"attention_mask": np.ones((2, 12))},
            TypeError,
            "attention_mask must be of booleans or integers, got float32",
        ),
        ({"segment_ids": np.ones((2, 3), np.int32)}, SpecError, r"documents must be of shape \[2, 12\]"),
    ],
)
def test_masks_that_do_not_fit(given: Any, error: Any, message: str) -> None:
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config_of("mistral")), rngs=nnx.Rngs(0))))
    with pytest.raises(error, match="^Llama: " + message):
        jax.eval_shape(lambda p: nnx.merge(graph, p)(IDS, **given), state)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        (
            "mixtral",
            {"output_router_logits": True},
            UnsupportedError,
            "output_router_logits must be false, 0 or left out",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, SpecError, "num_experts_per_tok must be <= num_local_experts=4, got 5"),
        ("phi3", {"resid_pdrop": 0.1}, UnsupportedError, "resid_pdrop must be false, 0 or left out, got 0.1"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "use_bidirectional_attention must be false",
        ),
        ("phi3-long", {"head_dim": 4}, SpecError, "short_factor must be of 2 numbers, one a pair of a head, got 4"),
    ],
)
def test_configurations_it_cannot_do_are_refused(family: str, changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^LlamaConfig.from_hf: {message}"):
        LlamaConfig.from_hf(SIZES | FAMILIES[family] | changes)

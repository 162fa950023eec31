"""`parallelize` over 1, 2, 4 and 8 virtual devices: loss and updates in float64 are those of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from shared_specs.core.rounding import relative_error
from shared_specs.errors import SpecError
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import (
    LEARNING_RATE,
    QUICKLY,
    Blocks,
    assert_same,
    blocks_loss,
    computing_in,
    llama,
    llama_config,
    loss_and_gradients,
    mesh_of,
    packed,
    padded,
    run_quickly,
    token_ids,
)
from tiled_jax.core.products import wide
from tiled_jax.models import Llama, next_token_loss
from tiled_jax.parallel import ModelRules, parallelize, register_rules

pytestmark = pytest.mark.ranks

DDP = DataParallel(engine="ddp", reduce_dtype=None)
FSDP = DataParallel(reduce_dtype=None)
HYBRID = DataParallel(replicate_axis="replica", reduce_dtype=None)
FULL, SECOND, PRODUCTS = Checkpointing(), Checkpointing(mode="layers", every=2), Checkpointing(mode="products")
WHOLE = TensorParallel(sequence_parallel=False, loss_parallel=False)
ODD = {"vocab_size": 273, "num_hidden_layers": 1}  # no number of devices divides its vocabulary
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
Axes = dict[str, int]

# (axes, data, tensor, checkpointing, what the model has, axis type)
LLAMAS: dict[str, tuple[Axes, Any, Any, Any, dict[str, Any], AxisType]] = {
    "one device": ({"dp_shard": 1}, FSDP, None, None, {}, AxisType.Auto),
    "dp 2": ({"dp_shard": 2}, DDP, None, SECOND, BIASED, AxisType.Explicit),
    "fsdp 8": ({"dp_shard": 8}, FSDP, None, SECOND, BIASED, AxisType.Auto),
    "fsdp 4": ({"dp_shard": 4}, FSDP, None, None, {}, AxisType.Explicit),
    "fsdp 2, products": ({"dp_shard": 2}, FSDP, None, PRODUCTS, {}, AxisType.Auto),
    "fsdp 2, kept": (
        {"dp_shard": 2},
        DataParallel(reduce_dtype=None, reshard="never"),
        None,
        FULL,
        {},
        AxisType.Auto,
    ),
    "replicas 2 x fsdp 4": ({"replica": 2, "dp_shard": 4}, HYBRID, None, FULL, {}, AxisType.Auto),
    "tp 8": ({"tp": 8}, None, TensorParallel(sequence_parallel=False), None, {}, AxisType.Auto),
    "tp 4, whole head": ({"tp": 4}, None, WHOLE, None, BIASED, AxisType.Auto),
    "sp 8": ({"tp": 8}, None, TensorParallel(), FULL, BIASED, AxisType.Auto),
    "sp 2, whole head": ({"tp": 2}, None, TensorParallel(loss_parallel=False), None, {}, AxisType.Explicit),
    "sp 2, plain": ({"tp": 2}, None, TensorParallel(), None, {"plain": True}, AxisType.Auto),
    "fsdp 2 x tp 4": ({"dp_shard": 2, "tp": 4}, FSDP, TensorParallel(), PRODUCTS, BIASED, AxisType.Auto),
    "fsdp 2 x tp 2, whole tokens": (
        {"dp_shard": 2, "tp": 2},
        FSDP,
        TensorParallel(sequence_parallel=False),
        None,
        BIASED,
        AxisType.Auto,
    ),
    "replicas 2 x fsdp 2 x tp 2": (
        {"replica": 2, "dp_shard": 2, "tp": 2},
        HYBRID,
        TensorParallel(),
        SECOND,
        {},
        AxisType.Auto,
    ),
    "fsdp 4, few tokens": ({"dp_shard": 4}, FSDP, None, None, ODD | BIASED, AxisType.Explicit),
    "replicas 2 x fsdp 2, few tokens": ({"replica": 2, "dp_shard": 2}, HYBRID, None, None, ODD, AxisType.Auto),
    "tp 2, odd vocabulary": ({"tp": 2}, None, TensorParallel(sequence_parallel=False), None, ODD, AxisType.Auto),
    "sp 2, odd vocabulary": ({"tp": 2}, None, TensorParallel(), None, ODD | BIASED, AxisType.Auto),
    "sp 2, odd vocabulary, plain": ({"tp": 2}, None, TensorParallel(), None, ODD | {"plain": True}, AxisType.Auto),
    "tp 2, odd vocabulary, whole head": ({"tp": 2}, None, WHOLE, None, ODD, AxisType.Auto),
    "fsdp 2 x tp 2, odd vocabulary": (
        {"dp_shard": 2, "tp": 2},
        FSDP,
        TensorParallel(),
        None,
        ODD,
        AxisType.Auto,
    ),
    "fsdp 2 x tp 2, biases of q, k and v": (
        {"dp_shard": 2, "tp": 2},
        FSDP,
        TensorParallel(),
        None,
        {"model_type": "qwen2"},
        AxisType.Auto,
    ),
    "fsdp 2 x context 2 x tp 2": (
        {"dp_shard": 2, "cp": 2, "tp": 2},
        DataParallel(context_axis="cp", reduce_dtype=None),
        TensorParallel(),
        FULL,
        {},
        AxisType.Auto,
    ),
}


BLOCK: dict[str, Any] = {"scope": "block"}
LLAMAS |= {
    "block, dp 2": ({"dp_shard": 2}, DDP, None, SECOND, BLOCK | BIASED, AxisType.Auto),
    "block, fsdp 4": ({"dp_shard": 4}, FSDP, None, Checkpointing(offload=True), BLOCK | BIASED, AxisType.Explicit),
    "block, context 2": (
        {"dp_shard": 1, "cp": 2},
        DataParallel(context_axis="cp", reduce_dtype=None),
        None,
        FULL,
        BLOCK | BIASED,
        AxisType.Auto,
    ),
    "block, fsdp 2 x context 4, repeated key heads": (
        {"dp_shard": 2, "cp": 4},
        DataParallel(context_axis="cp", reduce_dtype=None),
        None,
        None,
        BLOCK | {"num_key_value_heads": 2},
        AxisType.Explicit,
    ),
    "block, tp 2": (
        {"tp": 2},
        None,
        TensorParallel(sequence_parallel=False),
        None,
        BLOCK | BIASED,
        AxisType.Auto,
    ),
    "block, sp 2": ({"tp": 2}, None, TensorParallel(), FULL, BLOCK | BIASED, AxisType.Auto),
    "block, sp 8": ({"tp": 8}, None, TensorParallel(), None, BLOCK, AxisType.Explicit),
    "block, fsdp 2 x sp 2": ({"dp_shard": 2, "tp": 2}, FSDP, TensorParallel(), FULL, BLOCK | BIASED, AxisType.Auto),
    "block, fsdp 2 x tp 2": ({"dp_shard": 2, "tp": 2}, FSDP, WHOLE, None, BLOCK, AxisType.Auto),
    "block, fsdp 2 x context 2 x sp 2": (
        {"dp_shard": 2, "cp": 2, "tp": 2},
        DataParallel(context_axis="cp", reduce_dtype=None),
        TensorParallel(),
        FULL,
        BLOCK | BIASED,
        AxisType.Auto,
    ),
    "block, replicas 2 x fsdp 2": ({"replica": 2, "dp_shard": 2}, HYBRID, None, None, BLOCK, AxisType.Auto),
}

RING: Any = DataParallel(context_axis="cp", context="ring", reduce_dtype=None)
RINGS: Any = DataParallel(context_axis=("ring", "cp"), context="2d", reduce_dtype=None)
# Key heads that no ring divides.
FEW: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 2}
LLAMAS |= {
    "packed, ring 2 x tp 2": ({"dp_shard": 1, "cp": 2, "tp": 2}, RING, TensorParallel(), FULL, FEW, AxisType.Auto),
    "packed, fsdp 2 x ring 4": ({"dp_shard": 2, "cp": 4}, RING, None, None, FEW, AxisType.Explicit),
    "ring 8": ({"dp_shard": 1, "cp": 8}, RING, None, PRODUCTS, FEW | {"num_attention_heads": 2}, AxisType.Auto),
    "packed, rings 2 x 2 x tp 2": (
        {"dp_shard": 1, "ring": 2, "cp": 2, "tp": 2},
        RINGS,
        TensorParallel(),
        None,
        FEW,
        AxisType.Auto,
    ),
    "block, ring 4": ({"dp_shard": 1, "cp": 4}, RING, None, None, BLOCK | FEW, AxisType.Auto),
    "block, packed, fsdp 2 x rings 2 x 2": (
        {"dp_shard": 2, "ring": 2, "cp": 2},
        RINGS,
        None,
        FULL,
        BLOCK | FEW,
        AxisType.Auto,
    ),
    "block, packed, ring 2 x sp 2": (
        {"dp_shard": 1, "cp": 2, "tp": 2},
        RING,
        TensorParallel(),
        FULL,
        BLOCK | FEW,
        AxisType.Auto,
    ),
    "packed, sp 2, plain": ({"tp": 2}, None, TensorParallel(), None, {"plain": True}, AxisType.Auto),
    "packed, fsdp 2, few tokens": ({"dp_shard": 2}, FSDP, None, None, ODD, AxisType.Auto),
    "packed, tp 2, whole head": ({"tp": 2}, None, WHOLE, None, ODD, AxisType.Auto),
}

QWEN3: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 2}  # q and k are normed
CONTEXT: Any = DataParallel(context_axis="cp", reduce_dtype=None)
ALL: Axes = {"dp_shard": 2, "cp": 2, "tp": 2}
LLAMAS |= {
    "qwen3, fsdp 2": ({"dp_shard": 2}, FSDP, None, None, QWEN3, AxisType.Auto),
    "qwen3, tp 2": ({"tp": 2}, None, WHOLE, None, QWEN3, AxisType.Auto),
    "qwen3, packed, fsdp 2 x context 2 x tp 2": (ALL, CONTEXT, TensorParallel(), FULL, QWEN3, AxisType.Auto),
    "qwen3, packed, ring 2 x tp 2": ({"dp_shard": 1, "cp": 2, "tp": 2}, RING, WHOLE, None, QWEN3, AxisType.Auto),
    "block, qwen3, tp 2": ({"tp": 2}, None, WHOLE, None, QWEN3 | BLOCK, AxisType.Auto),
    "block, qwen3, packed, fsdp 2 x context 2 x sp 2": (
        ALL,
        CONTEXT,
        TensorParallel(),
        FULL,
        QWEN3 | BLOCK,
        AxisType.Auto,
    ),
    "block, qwen3, packed, fsdp 2 x ring 2": (
        {"dp_shard": 2, "cp": 2},
        RING,
        None,
        None,
        QWEN3 | BLOCK,
        AxisType.Explicit,
    ),
}

# Positions turn nothing in the second layer of three.
SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}
LLAMAS |= {
    "smollm3, fsdp 2": ({"dp_shard": 2}, FSDP, None, SECOND, SMOLLM3, AxisType.Explicit),
    "smollm3, packed, fsdp 2 x context 2 x tp 2": (ALL, CONTEXT, TensorParallel(), FULL, SMOLLM3, AxisType.Auto),
    "smollm3, packed, ring 2 x tp 2": ({"dp_shard": 1, "cp": 2, "tp": 2}, RING, WHOLE, None, SMOLLM3, AxisType.Auto),
    "block, smollm3, fsdp 2": ({"dp_shard": 2}, FSDP, None, SECOND, SMOLLM3 | BLOCK, AxisType.Auto),
    "block, smollm3, packed, fsdp 2 x context 2 x sp 2": (
        ALL,
        CONTEXT,
        TensorParallel(),
        FULL,
        SMOLLM3 | BLOCK,
        AxisType.Auto,
    ),
    "block, smollm3, packed, fsdp 2 x ring 2": (
        {"dp_shard": 2, "cp": 2},
        RING,
        None,
        None,
        SMOLLM3 | BLOCK,
        AxisType.Explicit,
    ),
}

_REFERENCES: dict[str, Any] = {}


def batch_of(case: str, tokens: int) -> Any:
    return packed(tokens=tokens) if "packed" in case else padded(token_ids(tokens=tokens))


def reference(case: str, changes: dict[str, Any], tokens: int) -> Any:
    """Loss and gradients of one device, tiled and without anything parallel."""
    tiled = {name: value for name, value in changes.items() if name not in ("plain", "scope")}
    key = f"{tiled} {tokens} {'packed' in case}"
    if key not in _REFERENCES:
        _REFERENCES[key] = loss_and_gradients(llama(**tiled), next_token_loss, batch_of(case, tokens))
    return _REFERENCES[key]


# What every run checks; the rest combines the same parts in other ways.
IN_EVERY_RUN = (
    *("one device", "dp 2", "sp 8", "fsdp 2 x tp 2, whole tokens"),
    *(
        "fsdp 2 x context 2 x tp 2",
        "fsdp 4, few tokens",
        "dp 8",
        "everything",
        "block, fsdp 2 x context 4, repeated key heads",
    ),
    *("packed, rings 2 x 2 x tp 2", "block, packed, fsdp 2 x rings 2 x 2"),
    *("block, sp 2", "block, tp 2"),
    *("qwen3, packed, fsdp 2 x context 2 x tp 2", "block, qwen3, packed, fsdp 2 x context 2 x sp 2"),
    *("smollm3, packed, fsdp 2 x context 2 x tp 2", "block, smollm3, fsdp 2"),
    *("fsdp 2, sums in bfloat16", "fsdp 2 x tp 2, biases of q, k and v", "replicas 2 x fsdp 2 x tp 2, float32 sums"),
)


def some_slow(cases: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in cases]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("case", some_slow(LLAMAS))
def test_one_step_of_llama(case: str, float64: None) -> None:
    axes, data, tensor, checkpointing, changes, kind = LLAMAS[case]
    # The head is gathered where the devices' 8 x 40 tokens are more than its 272 entries, and otherwise the tokens are.
    length = 4 if "few tokens" in case else 40 if "attention_bias" in changes else 24
    length = 32 if case == "ring 8" else length  # two runs of two tokens for each device
    model, (loss, gradients) = llama(**changes), reference(case, changes, length)
    config = ParallelConfig(data=data, tensor=tensor, checkpointing=checkpointing)
    plan = parallelize(model, mesh_of(kind, **axes), config, optimizer=optax.sgd(LEARNING_RATE))
    before = nnx.state(model)
    after, found = run_quickly(plan.step, plan.state, batch_of(case, length), plan)
    assert_same(found, loss)
    update = jax.tree.map(lambda a, b: (a - np.asarray(b)) / LEARNING_RATE, before, after.parameters)
    assert_same(update, gradients)
    assert jax.tree.map(lambda a: a.sharding, after) == plan.shardings
    parts = 1 if data is DDP else int(np.prod([size for name, size in axes.items() if name != "replica"]))
    for path, leaf in nnx.to_flat_state(after.parameters):
        value = leaf.get_value()
        odd = "vocab_size" in changes and ("embed" in path or "head" in path)
        if "kernel" in path or "embedding" in path:
            held = parts if not odd or tensor is None else parts // axes["tp"]
            assert value.addressable_shards[0].data.size * held == value.size, path


BLOCKS: dict[str, tuple[Axes, Any, Any, Any, AxisType]] = {
    "dp 8": ({"dp_shard": 8}, DDP, None, None, AxisType.Auto),
    "fsdp 8": ({"dp_shard": 8}, FSDP, None, SECOND, AxisType.Explicit),
    "fsdp 2": ({"dp_shard": 2}, FSDP, None, FULL, AxisType.Auto),
    "tp 4": ({"tp": 4}, None, WHOLE, None, AxisType.Auto),
    "everything": ({"replica": 2, "dp_shard": 2, "tp": 2}, HYBRID, WHOLE, FULL, AxisType.Auto),
}
register_rules(
    Blocks,
    ModelRules(
        axes={
            "layers.*.w_down": ("wide", "hidden"),
            "layers.*.w_*": ("hidden", "wide"),
            "layers.*.b_down": ("norm",),
            "layers.*.b_*": ("wide",),
        },
        logical={"wide": "tensor"},
    ),
)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("case", some_slow(BLOCKS))
def test_any_model_with_rules(case: str, x64: None) -> None:
    """Its loss is the user's, written for one device; the last two cases leave tensor parallelism to XLA."""
    axes, data, tensor, checkpointing, kind = BLOCKS[case]
    x, model = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5, 6))), Blocks(nnx.Rngs(0))
    config = ParallelConfig(data=data, tensor=tensor, checkpointing=checkpointing)
    plan = parallelize(model, mesh_of(kind, **axes), config, loss_fn=blocks_loss)
    assert plan.step is None
    assert_same(run_quickly(plan.gradients, plan.state.parameters, x, plan), loss_and_gradients(model, blocks_loss, x))


MIXED: dict[str, tuple[Axes, Any, Any, Any]] = {
    "dp 4, parameters in bfloat16": ({"dp_shard": 4}, DDP, None, jnp.bfloat16),
    "fsdp 2, sums in bfloat16": (
        {"dp_shard": 2},
        DataParallel(param_dtype="bfloat16", reduce_dtype=None),
        None,
        jnp.float32,
    ),
    "fsdp 8, float32 sums": ({"dp_shard": 8}, DataParallel(param_dtype="bfloat16"), None, jnp.float32),
    "replicas 2 x fsdp 2 x tp 2, float32 sums": (
        {"replica": 2, "dp_shard": 2, "tp": 2},
        DataParallel(replicate_axis="replica", param_dtype="bfloat16"),
        WHOLE,
        jnp.float32,
    ),
}


def wide_loss(model: Blocks, x: jax.Array) -> jax.Array:
    error = model(x) - jnp.cos(x)
    return jnp.mean(error.astype(wide(error.dtype)) ** 2)


@pytest.fixture(scope="module")
def blocks_in_bfloat16() -> tuple[Blocks, jax.Array, Any]:
    """The model and a batch, with what one device makes of them."""
    model = computing_in(Blocks(nnx.Rngs(0), jnp.float32), jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5, 6)), jnp.bfloat16)
    return model, x, on_one_device(model, wide_loss, x)


@pytest.mark.deep
@pytest.mark.parametrize("case", some_slow(MIXED))
def test_any_model_in_bfloat16(case: str, blocks_in_bfloat16: Any) -> None:
    """Against float64, as wrong as the model in bfloat16 on one device may be."""
    axes, data, tensor, dtype = MIXED[case]
    model, x, expected = blocks_in_bfloat16
    config = ParallelConfig(data=data, tensor=tensor)
    plan = parallelize(computing_in(model, dtype), mesh_of(**axes), config, loss_fn=wide_loss)
    loss, gradients = run_quickly(plan.gradients, plan.state.parameters, x, plan)
    assert {a.dtype for a in jax.tree.leaves(gradients)} == {jnp.dtype(dtype)}
    assert_as_right((loss, gradients), *expected)


def test_a_loss_in_bfloat16_is_averaged_in_float32() -> None:
    """4 x 257 in bfloat16 would be 1024."""
    model = nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    config = ParallelConfig(data=DataParallel(param_dtype="bfloat16"))
    plan = parallelize(
        model, mesh_of(dp_shard=4), config, loss_fn=lambda model, x: (jnp.sum(jnp.exp(model(x) * 0)), 257)
    )
    loss, _ = plan.gradients(plan.state.parameters, jnp.ones((4, 4)))
    assert float(loss) == np.float32(16 / (4 * 257))


@pytest.mark.deep
@pytest.mark.parametrize("scope", ["mlp", pytest.param("block", marks=pytest.mark.slow)])
def test_llama_in_bfloat16(scope: str, x64: None) -> None:
    """Sums of activations over four devices in bfloat16, or of rounded parts in float32, of gradients over two in float32."""
    model = computing_in(llama(num_hidden_layers=2, scope=scope), jnp.bfloat16)
    config = ParallelConfig(data=DataParallel(param_dtype="bfloat16"), tensor=TensorParallel(), checkpointing=FULL)
    plan = parallelize(computing_in(model, jnp.float32), mesh_of(dp_shard=2, tp=4), config)
    found = run_quickly(plan.gradients, plan.state.parameters, token_ids(), plan)
    assert_as_right(found, *on_one_device(model, next_token_loss, token_ids()))


def on_one_device(model: Any, loss_fn: Any, batch: Any) -> tuple[Any, Any]:
    """Loss and gradients of a model in bfloat16, and those in float64."""
    with jax.numpy_dtype_promotion("standard"):
        plain = loss_and_gradients(model, loss_fn, batch)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        batch = batch if batch.dtype == np.int32 else batch.astype(jnp.float64)
        return plain, loss_and_gradients(computing_in(model, jnp.float64), loss_fn, batch)


def assert_as_right(found: Any, plain: Any, exact: Any) -> None:
    for (path, truth), a, b in zip(
        jax.tree.leaves_with_path(exact), *map(jax.tree.leaves, (found, plain)), strict=True
    ):
        a, b, truth = (np.asarray(value, np.float64) for value in (a, b, truth))
        assert_within(a, truth, limit(relative_error(b, truth), "bfloat16"), jax.tree_util.keystr(path))


def test_a_loss_of_sum_and_count(x64: None) -> None:
    """Devices that count differently: half of them have nothing that counts."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5, 6)))
    batch = {"x": x, "weight": jnp.asarray([1.0, 0.0, 3.0, 0.0])}

    def loss_fn(model: Blocks, batch: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(batch["weight"][:, None, None] * model(batch["x"]) ** 2), jnp.sum(batch["weight"])

    def mean(model: Blocks, batch: Any) -> jax.Array:
        total, count = loss_fn(model, batch)
        return total / count

    model = Blocks(nnx.Rngs(0))
    plan = parallelize(model, mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=loss_fn)
    assert_same(run_quickly(plan.gradients, plan.state.parameters, batch, plan), loss_and_gradients(model, mean, batch))
    assert_same(run_quickly(plan.loss, plan.state.parameters, batch, plan), mean(model, batch))


def test_metadata_goes_before_rules() -> None:
    """The names of a parameter's own sharding are mesh axes; without any, the longest dim that divides is split."""
    mesh = mesh_of(dp_shard=2, tp=4)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.named = nnx.Param(jnp.zeros((4, 8)), out_sharding=(None, "tp"))
            self.both = nnx.Param(jnp.zeros((4, 8)), out_sharding=("dp_shard", "tp"))
            self.silent = nnx.Param(jnp.zeros((3, 5, 6, 4)))
            self.odd = nnx.Param(jnp.zeros((3, 5)))

    with jax.set_mesh(mesh):
        model = Model()
    config = ParallelConfig(data=FSDP, tensor=WHOLE)
    plan = parallelize(model, mesh, config, loss_fn=lambda model, x: x.mean())
    found = {path[0]: leaf.get_value().spec for path, leaf in nnx.to_flat_state(plan.shardings.parameters)}
    assert found == {
        "named": P(None, "tp"),
        "both": P("dp_shard", "tp"),
        "silent": P(None, None, "dp_shard", None),
        "odd": P(None, None),
    }


@pytest.mark.parametrize("donate", [True, False])
def test_the_state_is_written_over_only_where_it_is_donated(donate: bool) -> None:
    model, x = Blocks(nnx.Rngs(0), jnp.float32), jnp.ones((8, 5, 6))
    config = ParallelConfig(data=DataParallel(), donate=donate)
    plan = parallelize(model, mesh_of(dp_shard=4), config, loss_fn=blocks_loss, optimizer=optax.adamw(0.1))
    given = jax.tree.leaves(plan.state)
    where = {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in given if leaf.size > 8}
    x = jax.device_put(x, plan.batch_sharding)
    step = plan.step.lower(plan.state, x).compile(QUICKLY)
    state, first = step(plan.state, x)
    assert all(leaf.is_deleted() == donate for leaf in given)
    now = {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size > 8}
    assert (now == where) == donate
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model))), "the model's own arrays"
    assert float(step(state, x)[1]) < float(first)


def test_shapes_first_and_parameters_later() -> None:
    """What loads a checkpoint: a model of shapes, its shardings, then `init` with arrays that lie anywhere."""
    model = Blocks(nnx.Rngs(0), jnp.float32)
    shapes = nnx.eval_shape(lambda: Blocks(nnx.Rngs(0), jnp.float32))
    mesh, x = mesh_of(replica=2, dp_shard=4), jnp.ones((8, 5, 6))
    options: Any = dict(loss_fn=blocks_loss, optimizer=optax.adamw(0.1))
    config = ParallelConfig(data=DataParallel(replicate_axis="replica"))
    late = parallelize(shapes, mesh, config, **options)
    assert late.state is None
    state = late.init(jax.tree.map(np.asarray, nnx.state(model)))
    assert jax.tree.map(lambda a: a.sharding, state) == late.shardings
    assert jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state) == late.shapes
    early = parallelize(model, mesh, config, **options)
    assert late.batch_sharding == NamedSharding(mesh, P(("replica", "dp_shard")))
    placed = jax.device_put(x, late.batch_sharding)
    assert early.shardings == late.shardings
    step = late.step.lower(state, placed).compile(QUICKLY)
    assert float(step(state, placed)[1]) == float(step(early.state, placed)[1])


def test_llama_of_shapes_needs_no_memory() -> None:
    model = nnx.eval_shape(lambda: Llama(llama_config(hidden_size=2**16, vocab_size=2**16), rngs=nnx.Rngs(0)))
    plan = parallelize(model, mesh_of(dp_shard=8), ParallelConfig(data=DataParallel()), optimizer=optax.adamw(1e-3))
    moments = optax.tree.get(plan.shapes.optimizer, "mu")
    assert moments["embed"]["embedding"].get_value().sharding.spec == P(None, "dp_shard")


def test_what_was_applied_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing of what is refused."""
    caplog.set_level("INFO", "tiled_jax")
    config = ParallelConfig(checkpointing=Checkpointing(mode="op"), data=DataParallel())
    model, blocks = (
        nnx.eval_shape(lambda scope=scope: Llama(llama_config(), scope=scope, rngs=nnx.Rngs(0)))
        for scope in ("mlp", "block")
    )
    parallelize(model, mesh_of(dp_shard=2), config)
    parallelize(blocks, mesh_of(dp_shard=2), ParallelConfig(data=DataParallel()))
    with pytest.raises(SpecError):
        parallelize(model, mesh_of(other=2), config)
    data = "fsdp over dp_shard=2, param_dtype=None, reduce_dtype=float32, reshard=default"
    assert [record.getMessage() for record in caplog.records] == [
        "parallelize: tiling: 3 x tiled_mlp, 1 x tiled_linear_cross_entropy",
        "parallelize: checkpointing: mode=op",
        f"parallelize: data parallelism: {data}",
        "parallelize: tiling: 3 x tiled_block, 1 x tiled_linear_cross_entropy",
        f"parallelize: data parallelism: {data}",
    ]

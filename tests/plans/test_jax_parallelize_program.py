"""The compiled programs of `parallelize`: what is gathered, how often, in which dtype, and how many bytes that takes."""

import math
import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.layers.ring import ring_bytes
from shared_specs.tolerances import COST_BYTES
from tests.core.jax_counting import collectives, sent_bytes
from tests.plans.jax_parallel_models import QUICKLY, llama_config, mesh_of
from tiled_jax.models import Llama
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks

HIDDEN, INTERMEDIATE, VOCAB, TOKENS, LAYERS = 128, 384, 272, 520, 4
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "head_dim": 16, "tie_word_embeddings": False}
LAYER = {(HIDDEN, HIDDEN): 4, (HIDDEN, INTERMEDIATE): 2, (INTERMEDIATE, HIDDEN): 1}  # shape of a matrix -> how many
LAYER_BYTES = 4 * sum(a * b * count for (a, b), count in LAYER.items())
FSDP, RECOMPUTED = DataParallel(), Checkpointing()


def planned(axes: dict[str, int], sizes: dict[str, Any] = SIZES, scope: str = "mlp", **config: Any) -> Any:
    options: Any = {"tiling": Tiling(num_shards=4), "scope": scope}
    model = nnx.eval_shape(lambda: Llama(llama_config(num_hidden_layers=LAYERS, **sizes), **options, rngs=nnx.Rngs(0)))
    return parallelize(model, mesh_of(**axes), ParallelConfig(**config))


def lowered(axes: dict[str, int], tokens: int = TOKENS, sizes: dict[str, Any] = SIZES, **config: Any) -> Any:
    plan = planned(axes, sizes, **config)
    return plan, plan.gradients.lower(plan.shapes.parameters, jax.ShapeDtypeStruct((4, tokens + 1), jnp.int32))


@cache
def compiled(*axes: tuple[str, int], **config: Any) -> Any:
    return lowered(dict(axes), **config)[1].compile(QUICKLY)


def counted(program: Any, kind: str) -> Counter[tuple[int, ...]]:
    """Shapes of the results of every collective of a kind in the compiled program."""
    found = re.findall(rf"= (\S+?)(?:\{{\S+\}})? {kind}(?:-start)?\(", program.as_text())
    return Counter(tuple(map(int, re.findall(r"\d+", re.findall(r"\[([\d,]*)\]", shape)[0]))) for shape in found)


@pytest.mark.parametrize(
    ("checkpointing", "scope"),
    [
        pytest.param(None, "mlp", id="kept", marks=[pytest.mark.slow, pytest.mark.figures]),
        pytest.param(RECOMPUTED, "mlp", id="recomputed"),
        pytest.param(None, "block", id="block", marks=[pytest.mark.slow, pytest.mark.figures]),
    ],
)
def test_fsdp_gathers_one_layer_in_forward_and_again_in_backward(checkpointing: Any, scope: str) -> None:
    """No activation is gathered: 4 x 520 tokens of 128 would be [2080, 128], one device's own [520, 128].

    Of the table no more moves than the rows of the tokens; the head is gathered, having fewer entries than there are tokens.
    """
    program = compiled(("dp_shard", 4), data=FSDP, checkpointing=checkpointing, scope=scope)
    gathers = counted(program, "all-gather")
    expected = Counter({HIDDEN * VOCAB: 1, 4 * TOKENS: 1})
    for (a, b), count in LAYER.items():
        expected[a * b] += 2 * count
    assert Counter(math.prod(shape) for shape in gathers.elements()) == expected
    # Parts lie one behind the other: along an inner dim XLA would gather what it has transposed, of all layers at once.
    assert all(shape[0] == 4 for shape in gathers if shape != (4 * TOKENS,))
    scattered = counted(program, "reduce-scatter")
    assert scattered.total() == sum(LAYER.values()) + 1, "one for each parameter that is split, none for activations"
    assert not any(TOKENS in shape or 4 * TOKENS in shape for shape in scattered)


@pytest.mark.deep
def test_few_tokens_are_gathered_instead_of_table_and_head() -> None:
    """Neither the whole weights of the two ends nor their gradients are there: half of one would be too much."""
    vocab, tokens = 8192, 64
    sizes = SIZES | {"vocab_size": vocab}
    gathered, temporary = [], []
    for data in (FSDP, DataParallel(reshard="never")):
        _, program = lowered({"dp_shard": 4}, tokens, sizes, data=data, checkpointing=RECOMPUTED)
        compiled = program.compile(QUICKLY)
        gathered.append(counted(compiled, "all-gather"))
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert not any(vocab in shape for shape in gathered[0])
    assert gathered[1][4, vocab, HIDDEN // 4] == gathered[1][4, HIDDEN // 4, vocab] == 1, (
        "kept weights are gathered weights"
    )
    end = 4 * vocab * HIDDEN
    assert temporary[0] < end // 2 + LAYERS * LAYER_BYTES, temporary
    assert temporary[1] > 2 * end


@pytest.mark.deep
def test_gathered_weights_are_freed_unless_asked_otherwise() -> None:
    """With reshard="never" the weights of all four layers are there at once."""
    programs = [
        compiled(("dp_shard", 4), data=data, checkpointing=None) for data in (DataParallel(reshard="never"), FSDP)
    ]
    kept, freed = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert kept - freed == pytest.approx(LAYERS * LAYER_BYTES, rel=COST_BYTES)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_sequence_parallel_devices_never_hold_all_tokens(scope: str) -> None:
    """A device has 130 shards' worth of rows of each sequence: gathered shards are a quarter of all tokens, [520, 128]."""
    program = compiled(("tp", 4), tensor=TensorParallel(), scope=scope)
    whole = 4 * TOKENS
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        for shape in counted(program, kind):
            assert not (whole in shape and HIDDEN in shape), (kind, shape)
    assert (TOKENS, HIDDEN) in counted(program, "all-gather")


def test_replicas_meet_once_a_step_for_each_parameter() -> None:
    plan, _ = lowered({"dp_shard": 4}, data=DataParallel(engine="ddp"))
    parameters = plan.shapes.parameters
    batch = jax.ShapeDtypeStruct((4, TOKENS + 1), jnp.int32, sharding=plan.batch_sharding)
    count = len(jax.tree.leaves(parameters))
    # And the sums of the losses and of the tokens that they are of.
    assert collectives(plan.gradients.compiled, parameters, batch) == {False: count + 2, True: 0}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "gathered", "summed"),
    [(None, "float32", "f32", "f32"), ("bfloat16", "float32", "bf16", "f32"), ("bfloat16", None, "bf16", "bf16")],
)
def test_weights_are_gathered_and_gradients_summed_in_the_dtypes_asked_for(
    param_dtype: str | None, reduce_dtype: str | None, gathered: str, summed: str
) -> None:
    data = DataParallel(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    plan, program = lowered({"dp_shard": 4}, data=data, checkpointing=RECOMPUTED)
    text = program.as_text()

    def dtypes(name: str) -> set[str]:
        pattern = rf'"?stablehlo\.{name}"?.*?-> tensor<[\dx]*x(\w+)>'
        return set(re.findall(pattern, text, flags=re.DOTALL))

    assert dtypes("all_gather") == {gathered, "i32"}  # and the ids of the tokens
    assert dtypes("reduce_scatter") == {summed}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(plan.shapes.parameters)} == {"float32"}


@pytest.mark.deep
def test_mode_op_neither_attends_nor_scatters_again() -> None:
    """Of a sequence-parallel decoder: as many reduce-scatters and products of attention as without recomputation."""
    found = {}
    for checkpointing in (None, RECOMPUTED, Checkpointing(mode="op")):
        text = lowered({"tp": 2}, tensor=TensorParallel(), checkpointing=checkpointing)[1].as_text()
        batched = [line for line in text.splitlines() if "dot_general" in line and "batching_dims" in line]
        found[checkpointing and checkpointing.mode] = text.count("stablehlo.reduce_scatter"), len(batched)
    assert found["op"] == found[None]
    assert found["full"][0] == found[None][0] + 1
    assert found["full"][1] > found[None][1]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("checkpointing", "scope", "forwards"),
    [(None, "mlp", 1), (RECOMPUTED, "mlp", 2), (Checkpointing(mode="op"), "mlp", 1), (None, "block", 2)],
)
def test_rings_send_what_the_formula_says(checkpointing: Any, scope: str, forwards: int) -> None:
    """Keys and values round once more where attention is computed again, which mode "op" spares."""
    data = DataParallel(context_axis="cp", context="ring")
    plan = planned({"dp_shard": 1, "cp": 4}, data=data, checkpointing=checkpointing, scope=scope)
    batch = jax.ShapeDtypeStruct((4, TOKENS + 1), jnp.int32, sharding=plan.batch_sharding)
    found = sent_bytes(plan.gradients.compiled, plan.shapes.parameters, batch)
    sizes: Any = {"ring": 4, "batch": 4, "held": TOKENS // 4, "kv_heads": 8, "features": 2 * 16, "itemsize": 4}
    assert found == LAYERS * ring_bytes(**sizes, forwards=forwards)

"""`plan` beside what XLA says of the JAX half's own step, compiled for one device and for eight."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx

from shared_specs.app.plan.decoder import CAPS, MODELS, Decoder
from shared_specs.app.plan.simulated import Simulated, beside_simulation
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_COMPILED
from tests.app.test_plan_settings import recommended
from tests.models.test_jax_block import MERGES, RULE
from tiled_jax.commands.plan.simulate import SIMULATOR, model_of, simulate
from tiled_jax.plans.checks import check_model, checked_axes
from tiled_jax.plans.registry import placement_of, rules_of

pytestmark = pytest.mark.ranks

SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=256)


def assert_predicted(decoder: Decoder, **given: Any) -> tuple[Setting, Simulated]:
    """The bytes of a step in float32 on this processor, and return what was simulated."""
    setting = Setting(**{"shard_tokens": 1024} | given, dtype="float32", optimizer="sgd", device="cpu", half="jax")
    found, parts = simulate(decoder, setting), parts_of(decoder, setting)
    predicted = parts.total - RESERVE
    print(f"{predicted / found.device:.3f}", given, found, parts.by_name)
    assert predicted == pytest.approx(found.device, rel=PLAN_COMPILED)
    return setting, found


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("vocab", [256, 32000], ids=["layers", "head"])
@pytest.mark.parametrize(("gpus", "context"), [(1, 1), (8, 1), (8, 4)])
def test_bytes_of_a_step(gpus: int, context: int, vocab: int) -> None:
    assert_predicted(replace(SMALL, vocab=vocab), tokens=4096 * context, gpus=gpus, context=context)


# Ranks and how they attend; key heads. Some are repeated, in a place or in a context that exchanges heads alone.
CONTEXTS: list[tuple[dict[str, Any], int]] = [
    ({"context": 2, "context_kind": "ring"}, 4),
    ({"context": 8, "context_kind": "2d", "inside": 2}, 1),
    ({"context": 8, "context_kind": "ring"}, 8),
    ({"context": 8, "context_kind": "2d", "inside": 4}, 2),
    ({"context": 4, "context_kind": "ring"}, 8),
    ({"context": 8}, 1),
]


@pytest.mark.deep
@pytest.mark.parametrize(
    "of", [CONTEXTS[:2], pytest.param(CONTEXTS[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_bytes_of_rings_and_of_repeated_key_heads(of: list[tuple[dict[str, Any], int]]) -> None:
    """Keys and values go round, of groups too, and beside them sums of their gradients. Slow: a compilation each."""
    for context, kv_heads in of:
        decoder, tokens = replace(SMALL, kv_heads=kv_heads), 4096 * context["context"]
        setting, found = assert_predicted(decoder, **context, tokens=tokens, gpus=8)
        assert ("collective-permute" in found.collectives) == (setting.ring > 1)
        # Two exchange rows of the table, and their gradients.
        assert (found.collectives["all-to-all"] > 2) == (setting.exchanging > 1)


# Ranks that split layers and how those of a context attend beside them; entries of the vocabulary.
SPLIT: list[tuple[dict[str, Any], int]] = [
    ({"tensor": 2, "context": 2, "tokens": 32768}, 256),
    ({"tensor": 4, "tokens": 8192}, 32000),
    ({"tensor": 2, "tokens": 4096}, 32000),
    ({"tensor": 4, "tokens": 32768}, 256),
    ({"tensor": 2, "context": 4, "context_kind": "ring", "tokens": 32768}, 256),
    ({"tensor": 2, "context": 4, "context_kind": "2d", "inside": 2, "tokens": 32768}, 256),
]


@pytest.mark.deep
@pytest.mark.parametrize("of", [SPLIT[:2], pytest.param(SPLIT[2:], marks=pytest.mark.slow)], ids=["some", "others"])
def test_bytes_where_layers_are_split(of: list[tuple[dict[str, Any], int]]) -> None:
    """Two gathered shards are there at a time, and of the vocabulary a part. Slow: a compilation each."""
    for split, vocab in of:
        shard = 1024 // split["tensor"]
        setting, found = assert_predicted(replace(SMALL, vocab=vocab), **split, gpus=8, shard_tokens=shard)
        assert ("collective-permute" in found.collectives) == (setting.ring > 1)


@pytest.mark.deep
def test_a_program_for_this_processor_stands_in_for_a_gpus() -> None:
    """In float32, its layers' inputs where they are; the head is not gathered for so few tokens."""
    setting = Setting(tokens=16384, gpus=8, context=8, offload=True, half="jax")
    beside = beside_simulation(replace(SMALL, vocab=32000), setting, SIMULATOR)
    assert (beside["set"]["device"], beside["set"]["dtype"], beside["set"]["offload"]) == ("cpu", "float32", False)
    assert beside["predicted_bytes"] == pytest.approx(beside["simulated_bytes"], rel=PLAN_COMPILED)
    assert set(beside["collectives"]) >= {"all-gather", "all-to-all", "reduce-scatter"}


# Fused projections with a window in every layer; layers without positions; norms behind branches, with windows in some layers.
KINDS = [
    replace(SMALL, kind="phi3", window=512, windowed=3),
    replace(SMALL, kind="smollm3", tied=True),
    replace(SMALL, kind="gemma3_text", tied=True, window=512, windowed=2),
    replace(SMALL, kind="gemma3_text"),
    replace(SMALL, kind="gemma2", tied=True, window=512, windowed=2, caps=CAPS),
]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("decoder", KINDS[::-1], ids=lambda decoder: f"{decoder.kind}-{decoder.windowed}")
def test_bytes_of_other_families(decoder: Decoder) -> None:
    """In shards of which several arrays more lie there where there are norms behind branches."""
    for shard_tokens, context in ((1024, 1), (2048, 1), (1024, 4)):
        assert_predicted(decoder, tokens=4096 * context, gpus=4, context=context, shard_tokens=shard_tokens)


# Few experts with many features, of which each shard of tokens chooses all, and many with few.
EXPERTS = [
    replace(SMALL, kind="mixtral", intermediate=512, experts=4, chosen=2),
    replace(SMALL, kind="qwen3_moe", intermediate=128, experts=32, chosen=4),
]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("decoder", EXPERTS[::-1], ids=lambda decoder: decoder.kind)
def test_bytes_of_experts(decoder: Decoder) -> None:
    """On one device and on eight, also where attention is the highest point, and with another number of shards."""
    for tokens, gpus, context, shard_tokens in (
        (4096, 1, 1, 1024),
        (4096, 8, 4, 1024),
        (16384, 8, 1, 1024),
        (8192, 8, 8, 512),
    ):
        assert_predicted(decoder, tokens=tokens * context, gpus=gpus, context=context, shard_tokens=shard_tokens)


@pytest.mark.deep
@pytest.mark.skipif(MERGES, reason="of what XLA compiles, " + RULE)
@pytest.mark.parametrize("context", [1, 4])
def test_bytes_of_many_tokens(context: int) -> None:
    """Where a layer's attention, and no shard, is the highest point."""
    assert_predicted(SMALL, tokens=32768 * context, gpus=8, context=context)


def test_norms_of_heads_cost_no_token_more() -> None:
    """A Qwen3's: q and k are made again a shard at a time, and not kept."""
    assert_predicted(replace(SMALL, kind="qwen3"), tokens=4096)


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_a_recommendation_has_a_place(name: str) -> None:
    """The model itself, as shapes, and where the mesh splits it, as `parallelize` asks before it compiles anything."""
    settings = list(dict.fromkeys(recommended(name, "jax")))
    model = nnx.eval_shape(lambda: model_of(MODELS[name], settings[0]))
    rules = rules_of(model)
    for setting in settings:
        mesh: Any = SimpleNamespace(shape=setting.axes)
        axes = checked_axes(setting.config, mesh)
        check_model(model, mesh, setting.config, axes, rules)
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            placement_of("parallelize", path, leaf.get_value().shape, None, rules, axes)

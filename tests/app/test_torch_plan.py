"""`plan` beside the PyTorch half's own step over simulated ranks: what it predicts and what is held."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.plan.decoder import MODELS, Decoder
from shared_specs.app.plan.record import recorded_setting
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, PLAN_BYTES, PLAN_LONG, PLAN_RECORDED, PLAN_SHORT

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(1200)  # of the steps that are simulated for all tests together
ROOT = Path(__file__).parents[2]
RANKS = 8

# In a process of its own: what simulates brings a kind of device that stays.
SIMULATING = """
import json, sys
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.simulated import simulated_step
from shared_specs.app.plan.step import Setting
from tiled_torch.commands.plan.simulate import SIMULATOR
for decoder, setting in json.load(sys.stdin):
    found = simulated_step(Decoder(**decoder), Setting(**setting), SIMULATOR)
    print(json.dumps({"device": found.device, "host": found.host, "collectives": found.collectives}), flush=True)
"""


def simulated(cases: list[tuple[Decoder, Setting]]) -> list[dict[str, Any]]:
    """What is held in every case, in order."""
    given = json.dumps([(asdict(decoder), asdict(setting)) for decoder, setting in cases])
    run = subprocess.run(
        [sys.executable, "-c", SIMULATING], input=given, cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_predicted(decoder: Decoder, setting: Setting, found: dict[str, Any]) -> None:
    parts = parts_of(decoder, setting)
    predicted = parts.total - RESERVE
    ratio = predicted / found["device"]
    print(f"{ratio:.3f}", found, parts.by_name)
    assert 1 - PLAN_SHORT <= ratio <= 1 + PLAN_LONG


LAYERS, HEAD = 256, 32000  # entries of the vocabulary with which a layer or the loss is the peak
SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=LAYERS)
# Ranks that split every layer: shards as long as the others' together.
TWO, FOUR = ({"tensor": ranks, "shard_tokens": 1024 // ranks} for ranks in (2, 4))
# scope, context, dtype, vocabulary, device; on a GPU with inputs, or all state, on the host
CASES: list[tuple[Any, ...]] = [
    ("block", 2, "float32", LAYERS, {"device": "cpu"}),
    ("block", 4, "bfloat16", LAYERS, {"device": "cpu"}),
    ("mlp", 1, "float32", LAYERS, {"device": "cpu"}),
    ("mlp", 4, "bfloat16", HEAD, {"device": "cpu"}),
    ("none", 1, "bfloat16", LAYERS, {"device": "cpu"}),
    ("none", 1, "bfloat16", HEAD, {"device": "cpu"}),
    ("block", 8, "bfloat16", HEAD, {}),
    ("block", 1, "float32", LAYERS, {"offload": True, "host_state": True, "optimizer": "adamw"}),
    ("mlp", 2, "bfloat16", LAYERS, {"offload": True}),
    ("block", 4, "float32", LAYERS, {"context_kind": "ring", "device": "cpu"}),
    ("mlp", 4, "bfloat16", LAYERS, {"context_kind": "ring"}),
    ("block", 8, "bfloat16", LAYERS, {"context_kind": "2d", "inside": 2}),
    ("mlp", 4, "float32", LAYERS, {"context_kind": "2d", "inside": 2, "device": "cpu"}),
    ("block", 1, "float32", LAYERS, TWO | {"device": "cpu"}),
    ("block", 2, "bfloat16", HEAD, TWO),
]
# Of other families: what is beside, or fused, and their windows. The scope that is planned, and untiled norms of heads.
FAMILIES: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"kind": "qwen3"}, ("mlp", 4, "float32", LAYERS, {"device": "cpu"})),
    ({"kind": "qwen3"}, ("mlp", 1, "bfloat16", LAYERS, {})),
    ({"kind": "phi3"}, ("block", 1, "bfloat16", LAYERS, {})),
    ({"kind": "smollm3"}, ("block", 4, "bfloat16", LAYERS, {"context_kind": "ring"})),
    ({"kind": "smollm3"}, ("block", 4, "float32", LAYERS, {"device": "cpu"})),
    ({"kind": "gemma3_text", "tied": True, "window": 512, "windowed": 3}, ("block", 1, "bfloat16", LAYERS, {})),
    # One key head, all query heads of which attend at once; and as many as query heads, each with masks of its own.
    (
        {"kind": "mistral", "kv_heads": 1, "window": 512, "windowed": 3},
        ("block", 1, "bfloat16", LAYERS, {"tokens": 16384, "offload": True}),
    ),
    (
        {"kind": "mistral", "kv_heads": 8, "window": 1024, "windowed": 3},
        ("block", 1, "float32", LAYERS, {"tokens": 8192, "device": "cpu"}),
    ),
    (
        {"kind": "gemma3_text", "tied": True, "window": 512, "windowed": 3},
        ("block", 4, "float32", LAYERS, {"device": "cpu"}),
    ),
    (
        {"kind": "gemma3_text", "tied": True, "window": 512, "windowed": 3},
        ("block", 4, "bfloat16", LAYERS, {"context_kind": "ring"}),
    ),
    ({"kind": "qwen3", "tied": True, "attention_bias": True}, ("block", 2, "float32", LAYERS, TWO | {"device": "cpu"})),
    # Many tokens, of which a split embedding has a shard's gradient at a time.
    (
        {"kv_heads": 8},
        ("block", 1, "bfloat16", LAYERS, {"tensor": 8, "shard_tokens": 128, "tokens": 2**16, "offload": True}),
    ),
]
# Of experts, in models deep enough that what grows with their number does.
EXPERTS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"experts": 4, "chosen": 1}, ("block", 1, "bfloat16", LAYERS, {})),
    ({}, ("block", 1, "bfloat16", LAYERS, {"tokens": 8192})),
    ({}, ("block", 1, "float32", LAYERS, {"tokens": 16384, "device": "cpu"})),
    ({"experts": 32, "chosen": 4, "intermediate": 224}, ("block", 1, "bfloat16", LAYERS, {"tokens": 8192})),
    ({"chosen": 1}, ("block", 4, "bfloat16", LAYERS, {"offload": True})),
    ({}, ("block", 4, "float32", LAYERS, {"context_kind": "ring", "device": "cpu"})),
    ({}, ("block", 2, "bfloat16", HEAD, {"offload": True, "host_state": True, "optimizer": "adamw"})),
]
MORE: list[tuple[Any, ...]] = [
    ("block", 1, "bfloat16", LAYERS, {"device": "cpu"}),
    ("block", 1, "float32", HEAD, {"device": "cpu"}),
    ("block", 8, "bfloat16", HEAD, {"device": "cpu"}),
    ("mlp", 1, "bfloat16", LAYERS, {"device": "cpu"}),
    ("mlp", 4, "float32", LAYERS, {"device": "cpu"}),
    ("none", 1, "float32", LAYERS, {"device": "cpu"}),
    ("block", 4, "bfloat16", LAYERS, {"offload": True}),
    ("none", 1, "bfloat16", HEAD, {}),
    ("block", 2, "float32", LAYERS, {"context_kind": "ring", "device": "cpu"}),
    ("mlp", 2, "bfloat16", LAYERS, {"context_kind": "ring", "offload": True}),
    ("mlp", 8, "float32", LAYERS, {"context_kind": "ring"}),
    ("block", 4, "float32", LAYERS, {"context_kind": "2d", "inside": 2, "device": "cpu"}),
    ("block", 8, "float32", LAYERS, {"context_kind": "2d", "inside": 4}),
    ("block", 8, "bfloat16", LAYERS, {"context_kind": "2d", "inside": 4, "device": "cpu"}),
    ("block", 8, "bfloat16", LAYERS, {"context_kind": "2d", "inside": 2, "offload": True}),
    ("mlp", 8, "float32", LAYERS, {"context_kind": "2d", "inside": 4}),
    ("mlp", 8, "bfloat16", LAYERS, {"context_kind": "2d", "inside": 2}),
    ("block", 4, "bfloat16", LAYERS, TWO | {"context_kind": "2d", "inside": 2, "offload": True}),
    ("block", 1, "bfloat16", LAYERS, FOUR),
    ("block", 2, "float32", HEAD, FOUR | {"device": "cpu"}),
    ("block", 1, "bfloat16", HEAD, FOUR | {"device": "cpu"}),
    ("block", 4, "float32", LAYERS, TWO | {"context_kind": "ring", "device": "cpu"}),
    ("block", 2, "bfloat16", LAYERS, TWO | {"context_kind": "ring"}),
    ("block", 1, "bfloat16", LAYERS, TWO | {"offload": True, "host_state": True}),
]


def cases(of: list[tuple[Any, ...]]) -> list[tuple[Decoder, Setting]]:
    return [
        (
            replace(SMALL, vocab=vocab),
            Setting(
                **{"optimizer": "sgd", "shard_tokens": 1024, "tokens": 4096 * context} | more, gpus=RANKS, context=context,
                scope=scope, dtype=dtype, kernels=False,
            ),
        )
        for scope, context, dtype, vocab, more in of
    ]  # fmt: skip


@pytest.fixture(scope="module")
def small() -> list[dict[str, Any]]:
    return simulated(cases(CASES))


@pytest.mark.deep
@pytest.mark.parametrize("number", range(len(CASES)))
def test_bytes_of_a_step(number: int, small: list[dict[str, Any]]) -> None:
    decoder, setting = cases(CASES)[number]
    assert_predicted(decoder, setting, small[number])
    assert small[number]["host"] == pytest.approx(parts_of(decoder, setting).host, rel=PLAN_BYTES)


@pytest.mark.deep
@pytest.mark.parametrize(
    "of", [FAMILIES[::2], pytest.param(FAMILIES[1::2], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_bytes_of_other_families(of: list[tuple[dict[str, Any], tuple[Any, ...]]]) -> None:
    given = [(replace(decoder, **changes), setting) for changes, case in of for decoder, setting in cases([case])]
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        print(decoder.kind, setting.scope)
        assert_predicted(decoder, setting, found)


@pytest.mark.deep
@pytest.mark.parametrize("of", [EXPERTS[:1], pytest.param(EXPERTS[1:], marks=pytest.mark.slow)], ids=["one", "others"])
def test_bytes_of_experts(of: list[tuple[dict[str, Any], tuple[Any, ...]]]) -> None:
    experts = {"kind": "mixtral", "experts": 8, "chosen": 2, "intermediate": 896, "layers": 32}
    given = [
        (replace(decoder, **experts | changes), setting) for changes, case in of for decoder, setting in cases([case])
    ]
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        assert_predicted(decoder, setting, found)


@pytest.mark.deep
def test_bytes_of_untiled_experts() -> None:
    """Few tokens for the weights, whose gradients are the peak; and many, whose rows are there before any gradient."""
    given = []
    for kind, tokens in (("mixtral", 16384), ("qwen3_moe", 16384), ("qwen3_moe", 256)):
        [(decoder, setting)] = cases([("none", 1, "bfloat16", LAYERS, {"tokens": tokens, "optimizer": "adamw"})])
        given.append((replace(decoder, kind=kind, experts=16, chosen=4, intermediate=448), setting))
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        assert parts_of(decoder, setting).total - RESERVE == pytest.approx(found["device"], rel=PLAN_RECORDED)


# Of models by name, with the tokens of a rank: where a few layers hold what all do, so that half a percent is far.
NAMED: list[tuple[str, dict[str, Any]]] = [
    ("smollm2-1.7b", {"scope": "mlp", "dtype": "float32", "offload": True, "tokens": 32768}),
    ("llama-3-8b", {"scope": "mlp", "offload": True, "tokens": 8192}),
    ("llama-3-8b", {"scope": "mlp", "tokens": 16384}),
    ("llama-3-8b", {"scope": "none", "dtype": "float32", "offload": True, "tokens": 8192}),
    ("qwen2.5-1.5b", {"dtype": "float32", "offload": True, "tokens": 8192, "gpus": 2, "tensor": 2}),
    ("qwen3-1.7b", {"offload": True, "tokens": 16384, "gpus": 4, "tensor": 4}),
    ("qwen2.5-72b", {"tokens": 16384, "gpus": 4, "tensor": 4}),
]


@pytest.mark.deep
@pytest.mark.parametrize("of", [NAMED[:1], pytest.param(NAMED[1:], marks=pytest.mark.slow)], ids=["one", "others"])
def test_bytes_of_models_by_name(of: list[tuple[str, dict[str, Any]]]) -> None:
    """Their sums cast, inputs come back from the host, split embeddings in shards, weights that are tied."""
    given = [(MODELS[name], Setting(**{"gpus": RANKS, "kernels": False} | setting)) for name, setting in of]
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        assert parts_of(decoder, setting).total - RESERVE == pytest.approx(found["device"], rel=PLAN_RECORDED)


@pytest.mark.deep
def test_buffers_of_a_context_are_those_of_one_gpu() -> None:
    """[tokens of a GPU, hidden], of a layer with the attention of Llama-3-8B in bfloat16 whose input waits on the host."""
    decoder = replace(MODELS["llama-3-8b"], intermediate=512, layers=3, vocab=LAYERS)
    common: dict[str, Any] = {"gpus": RANKS, "scope": "block", "optimizer": "sgd", "offload": True, "kernels": False}
    lengths, contexts = (2048, 4096), (1, 2, 4, 8)
    given = [
        (decoder, Setting(tokens=own * context, context=context, shard_tokens=1024, **common))
        for context in contexts
        for own in lengths
    ]
    held = [found["device"] for found in simulated(given)]
    for number, context in enumerate(contexts):
        short, long = held[2 * number : 2 * number + 2]
        buffers = (long - short) / (lengths[1] - lengths[0]) / (decoder.hidden * 2)
        print(context, buffers)
        assert buffers <= 6.6
        sizes = {"heads": decoder.heads, "kv_heads": decoder.kv_heads, "head_dim": decoder.head_dim, "itemsize": 2}
        predicted = eager_block_row_bytes(hidden=decoder.hidden, **sizes, exchanging=context)
        assert buffers * decoder.hidden * 2 == pytest.approx(predicted, rel=COST_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_bytes_of_rings_with_few_and_many_key_heads(kv_heads: int) -> None:
    """Of which some are repeated for the ranks in a place, or every rank has several, as many as query heads."""
    groups = {"context_kind": "2d", "inside": 4}
    of: list[tuple[Any, ...]] = [
        ("mlp", 8, "bfloat16", LAYERS, groups),
        ("block", 8, "bfloat16", LAYERS, groups),
        ("block", 8, "float32", LAYERS, groups | {"device": "cpu"}),
        ("mlp", 2, "bfloat16", LAYERS, {"context_kind": "ring"}),
        ("block", 4, "bfloat16", LAYERS, {"context_kind": "ring"}),
    ]
    given = [(replace(decoder, kv_heads=kv_heads), setting) for decoder, setting in cases(of)]
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        assert_predicted(decoder, setting, found)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_bytes_of_more_steps(part: int) -> None:
    given = cases(MORE[part::4])
    for (decoder, setting), found in zip(given, simulated(given), strict=True):
        assert_predicted(decoder, setting, found)


@pytest.mark.deep
def test_the_command_prints_both(tmp_path: Path) -> None:
    """Of a model that is deeper than those that are run."""
    config = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path), "--tokens", "4096", "--gpus", "2", "--simulate", "--out", str(tmp_path / "out")]
    run = subprocess.run(
        [sys.executable, "-m", "tiled_torch", "plan", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Simulated: torch, bfloat16, on a gpu" in run.stdout
    beside = json.loads((tmp_path / "out" / "plan.json").read_text())["simulated"]
    assert beside["predicted_bytes"] == pytest.approx(beside["simulated_bytes"], rel=PLAN_BYTES)
    assert beside["collectives"]["allgather_base"] == 14  # of six layers and the ends, in forward and in backward


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tokens", "gpus"), [("qwen3-8b", 2**20, 8), ("llama-3-8b", 2**19, 1)])
def test_real_size(model: str, tokens: int, gpus: int) -> None:
    """Whole, with AdamW in float32: on eight GPUs in at most 34 GiB of each, or on one of 80 GB with its state on the host."""
    decoder, setting = MODELS[model], replace(recorded_setting(tokens, gpus), kernels=False)
    (found,) = simulated([(decoder, setting)])
    assert_predicted(decoder, setting, found)
    assert found["device"] <= (34 * 2**30 if gpus == 8 else 80e9 - RESERVE)

"""`plan`: sizes of published models, what fits and what no longer does, times beside published ones, the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.command import main, shared_command
from shared_specs.app.options import InputError, PlanOptions
from shared_specs.app.plan.decoder import MODELS, decoder_named, decoder_of
from shared_specs.app.plan.search import contexts, plan, step_flop, step_seconds
from shared_specs.app.plan.show import as_json, plan_of, show_plan
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.config import HALVES
from shared_specs.kernels.roofline import GPUS
from shared_specs.layers.block_costs import block_row_bytes
from shared_specs.tolerances import PLAN_SECONDS

# Of the published weight files.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
EIGHT = decoder_named("qwen3-8b")
H100 = GPUS["h100"]


def test_parameters_of_published_models() -> None:
    assert {name: decoder.parameters for name, decoder in MODELS.items()} == PARAMETERS


def test_a_config_says_the_sizes(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_named(str(tmp_path)) == decoder_named(str(tmp_path / "config.json")) == EIGHT
    assert decoder_of(config | {"model_type": "llama", "num_key_value_heads": None}, "").kv_heads == 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "must have a model_type of llama, mistral, qwen2, qwen3, got gpt2"),
        ([], "must have a model_type of llama, mistral, qwen2, qwen3, got list"),
        ({"model_type": "llama", "hidden_size": 8}, "must have whole numbers >= 1 for intermediate_size"),
    ],
)
def test_other_configs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decoder_of(config, "it")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("gpus", [1, 8])
def test_the_longest_context_is_the_longest(half: Any, gpus: int) -> None:
    """It fits, 1024 tokens a GPU more do not, and every lever reaches further than the one before."""
    found = plan(EIGHT, 4096, memory=int(H100.memory_bytes), gpus=gpus, half=half)
    lengths = [reach.tokens for reach in found.reach]
    assert lengths
    assert sorted(set(lengths)) == lengths
    for reach in found.reach:
        assert reach.parts.total <= found.memory
        assert parts_of(EIGHT, replace(reach.setting, tokens=reach.tokens + 1024 * gpus)).total > found.memory


def test_the_first_setting_that_fits() -> None:
    """As few ranks in a context as possible, and nothing on the host that need not be there."""
    short, long = (plan(EIGHT, tokens, memory=int(H100.memory_bytes), gpus=8).setting for tokens in (8192, 2**20))
    assert short is not None
    assert (short.context, short.scope, short.offload, short.host_state) == (1, "none", False, False)
    assert long is not None
    assert (long.scope, long.offload, long.host_state) == ("block", True, False)
    fewer = [ranks for ranks in contexts(EIGHT, 8) if ranks < long.context]
    assert all(parts_of(EIGHT, replace(long, context=ranks)).total > H100.memory_bytes for ranks in fewer)
    assert plan(EIGHT, 2**20, memory=8 * 2**30).setting is None
    scarce = plan(EIGHT, 2**20, memory=int(H100.memory_bytes), host=40 * 2**30, gpus=8).setting
    assert scarce is not None
    assert parts_of(EIGHT, scarce).host <= 40 * 2**30 < parts_of(EIGHT, long).host
    assert scarce.context > long.context


def test_bytes_of_the_state() -> None:
    """16 bytes of every parameter with AdamW, 8 with SGD, over all GPUs; on the host instead where that is asked for."""
    setting = Setting(tokens=2**20, gpus=8, context=8)
    adamw, sgd = (parts_of(EIGHT, replace(setting, optimizer=name)) for name in ("adamw", "sgd"))  # type: ignore[arg-type]
    assert adamw.weights + adamw.gradients + adamw.optimizer == pytest.approx(2 * EIGHT.parameters, abs=8)
    assert adamw.total - sgd.total == adamw.optimizer == 2 * adamw.weights
    host = parts_of(EIGHT, replace(setting, host_state=True))
    assert (host.weights, host.gradients, host.optimizer) == (0, 0, 0)
    assert host.host == adamw.weights + adamw.gradients + adamw.optimizer


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inputs_of_layers_in_jax_are_those_of_its_formula(dtype: Any) -> None:
    kept, waiting = (
        Setting(tokens=2**20, gpus=8, context=8, dtype=dtype, half="jax", offload=o) for o in (False, True)
    )
    sizes = {"hidden": EIGHT.hidden, "heads": EIGHT.heads, "kv_heads": EIGHT.kv_heads, "head_dim": EIGHT.head_dim}
    none, all_of = (block_row_bytes(**sizes, itemsize=kept.itemsize, kept_layers=n) for n in (0, EIGHT.layers))
    assert parts_of(EIGHT, kept).inputs == (all_of - none) * kept.rows == parts_of(EIGHT, waiting).host
    assert parts_of(EIGHT, waiting).inputs == 0


def test_a_million_tokens_on_eight_gpus() -> None:
    """Qwen3-8B with float32 AdamW, without the reserve: others need 56.2 GB a GPU (TRL's documentation, 2026-09)."""
    found = parts_of(EIGHT, Setting(tokens=2**20, gpus=8, context=8, offload=True))
    assert found.total - RESERVE <= 34 * 2**30


def test_time_beside_a_published_one() -> None:
    """TRL's documentation (2026-09): a step of Qwen3-8B with 1,048,576 tokens on eight H100s takes 373 to 380 s."""
    setting = Setting(tokens=2**20, gpus=8, context=8, offload=True)
    assert step_seconds(EIGHT, setting, H100) == pytest.approx(376, rel=PLAN_SECONDS)
    products, attention = step_flop(EIGHT, setting)
    short, of_short = step_flop(EIGHT, replace(setting, tokens=2**19))
    assert (products, attention) == (2 * short, 4 * of_short)


@pytest.mark.parametrize("half", HALVES)
def test_tables_json_and_picture(half: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = PlanOptions(model="qwen3-8b", tokens=2**20, gpus=8, out=str(tmp_path / "new"))
    assert show_plan(given, half) == 0
    shown = capsys.readouterr().out
    for word in ("qwen3-8b", "What to set", 'scope="block"', "optimizer", "Longest context", "nothing was run"):
        assert word in shown
    stored = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert stored == as_json(plan_of(given, half))
    assert stored["bytes"]["total"] == sum(n for name, n in stored["bytes"].items() if name not in ("total", "host"))
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert show_plan(replace(given, json=True, out=None), half) == 0
    assert json.loads(capsys.readouterr().out) == stored


def test_what_fits_nowhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_plan(PlanOptions(model="llama-3-70b", gpu="24GB"), "torch") == 1
    assert "Does not fit with any setting" in capsys.readouterr().out
    assert plan_of(PlanOptions(gpu="80GB"), "torch").seconds is None
    assert show_plan(PlanOptions(model="qwen3-8b", tokens=2**22 + 1, gpus=8), "torch") == 1
    assert "GPUs share a sequence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-5"], "plan: --model must be a config.json, a folder with one, or one of llama-2-7b"),
        (["--gpu", "h300"], "plan: --gpu must be one of a100, h100, h200, b200, or a size such as 80GB, got h300."),
        (["--gpu", "80 apples"], "plan: --gpu must be a size, got '80 apples'."),
        (["--host", "a lot"], "plan: --host must be a size, got 'a lot'."),
        (["--tokens", "0"], "plan: --tokens must be between 1 and 1073741824, got 0."),
        (["--gpus", "many"], "plan: --gpus must be a whole number, got many."),
        (["--dtype", "int4"], "plan: --dtype must be one of bfloat16, float32, got int4."),
        (["--out", "/dev/null/x"], "plan: --out cannot be written to"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = shared_command("plan", "cli", lambda given: show_plan(given, "torch"))
    assert main("tiled_torch", [command], ["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1

"""`plan` of transformers' models that have no formulas by name: their sizes are read from their layers, which run as blocks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.command import main
from shared_specs.app.plan.decoder import decoder_of
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_BYTES, PLAN_LONG, PLAN_SHORT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.app.torch_structure_steps import EXPERTS, KINDS, LATENTS, MIXTURES, config_of  # noqa: E402
from tiled_torch import plan, tile_model, tiling_paths  # noqa: E402
from tiled_torch.__main__ import COMMANDS  # noqa: E402
from tiled_torch.plan.sizes import decoder_of_model  # noqa: E402
from tiled_torch.plan.structure import decoder_by_structure  # noqa: E402

ROOT = Path(__file__).parents[2]
# Families that have formulas by name, with what differs from the sizes of all.
NAMED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")},
    "gemma3_text": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
}


def on_meta(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        known = transformers.AutoConfig.for_model(**config)
        return transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32)


@pytest.mark.parametrize("kind", NAMED)
def test_layers_say_what_the_config_says(kind: str) -> None:
    """Of families that have formulas by name: the sizes, and all bytes of a step, are the same read from the layers."""
    config = config_of(kind) | NAMED[kind]
    model = on_meta(config)
    named, found = decoder_of_model("plan", model), decoder_by_structure(model, "plan: model")
    assert replace(named, held=None) == decoder_of(config, "")
    assert found.fused == (kind == "phi3")
    assert found.normed == named.norms_behind == (kind == "gemma3_text")
    unlike = {
        "by_structure": False,
        "fused": False,
        "normed": False,
        "attention_bias": named.attention_bias,
        "mlp_bias": named.mlp_bias,
    }
    assert replace(found, **unlike, held=named.held) == named
    setting, found = Setting(tokens=2**17, gpus=8, sequences=2), replace(found, held=named.held)
    for lever in ({}, {"offload": True}, {"host_state": True}, {"dtype": "float32"}):
        assert parts_of(found, replace(setting, **lever)) == parts_of(named, replace(setting, **lever))


@pytest.mark.deep_but(10)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_without_formulas_by_name(kind: str) -> None:
    """All its parameters count, and of what is set nothing shares sequences or splits layers."""
    model = on_meta(config_of(kind))
    found = plan(model, 2**15, devices=8, device_memory="h100")
    assert found.plan.decoder.held.count == sum(parameter.numel() for parameter in model.parameters())
    assert found.plan.decoder.kind == kind
    if kind in LATENTS:
        assert (found.plan.decoder.head_dim, found.plan.decoder.value_dim) == (24, 16)
    if kind in MIXTURES:
        sizes = found.plan.decoder
        assert (sizes.experts, sizes.chosen, sizes.intermediate, sizes.matrices) == (4, 2, 48, 3)
        assert (sizes.shared > 0) == any("shared" in name for name, _ in model.named_parameters())
    assert found.what_to_set["mesh"].startswith("8 x 1 x 1: ")
    assert found.what_to_set["tile_model"] == 'scope="block"'
    assert [reach.lever for reach in found.plan.reach] == [
        "all but attention tiled",
        "all but attention tiled, inputs on the host",
        "all but attention tiled, inputs and all state on the host",
    ]
    assert all(reach.setting.context == reach.setting.tensor == 1 for reach in found.plan.reach)
    assert found.seconds is not None
    assert "are trained" in str(found)


def test_what_is_set_is_what_such_a_model_takes() -> None:
    """Tiled already, it has the same plan; its layers then are the blocks that were planned."""
    config = transformers.AutoConfig.for_model(**config_of("granite"))
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = str(plan(model, 4096, device_memory="24GB"))
    tile_model(model, scope="block")
    assert str(plan(model, 4096, device_memory="24GB")) == before
    ids = torch.zeros(1, 8, dtype=torch.long)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert {path for name, path in tiling_paths(model).items() if name.startswith("model.layers")} == {"tiled_block"}


def test_frozen_parameters_have_no_gradients() -> None:
    model = on_meta(config_of("granite"))
    whole = plan(model, 2**15, device_memory="24GB").bytes
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    found = plan(model, 2**15, device_memory="24GB").bytes
    assert found["weights"] == whole["weights"]
    assert found["gradients"] + found["optimizer"] < whole["optimizer"] / 100


def test_the_command_takes_a_config_of_such_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the numbers of the function."""
    config = config_of("granite")
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--tokens", "32768", "--gpus", "8", "--json"]
    assert main("tiled_torch", COMMANDS, words) == 0
    found, wanted = json.loads(capsys.readouterr().out), plan(on_meta(config), 2**15, devices=8)
    assert found["bytes"] == wanted.bytes
    assert found["model"]["parameters"] == wanted.plan.decoder.held.count


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("granite", ["--simulate"], "--simulate must be left out for granite, which has no model of its sizes."),
        (
            "granite",
            ["--tp", "2", "--gpus", "2"],
            "--tp must be 1 for granite, got 2. Its layers are sharded, and not split.",
        ),
        ("xlm", [], "got xlm. XLMWithLMHeadModel has no list of layers."),
        ("gemma4_assistant", [], "config.json must be the config of a causal language model of transformers: "),
        ("no_such_model", [], "config.json must be the config of a causal language model of transformers: "),
    ],
)
def test_what_the_command_refuses(
    kind: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    assert main("tiled_torch", COMMANDS, ["plan", "--model", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ")
    assert message in error
    assert error.count("\n") == 1


def held_in_steps(given: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a step of every case sets and holds, in order: in a process of its own, where the simulated device stays."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.app.torch_structure_steps"], input=json.dumps(given), cwd=ROOT, capture_output=True,
        text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "offload": True, "tokens": 8192},
    {"dtype": "float32", "device": "cpu", "tokens": 4096},
)
# On a CPU PyTorch writes the scores of all pairs where heads of values have another size.
STEPS = [
    (kind, setting | ({"device": "gpu"} if kind in LATENTS else {}))
    for setting in SETTINGS
    for kind in KINDS
    if kind != "apertus"  # whose activation reads values
]
SOME = [(kind, SETTINGS[0]) for kind in ("granite", "gpt_neox")]
OTHERS = [step for step in STEPS if step not in SOME]


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("given", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_bytes_of_a_step(given: list[tuple[str, dict[str, Any]]]) -> None:
    """Beside what simulated ranks hold."""
    off = {}
    for (kind, setting), found in zip(given, held_in_steps(given), strict=True):
        parts = parts_of(decoder_of_model("plan", on_meta(config_of(kind, large=True))), Setting(**found["set"]))
        ratio = (parts.total - RESERVE) / found["device"]
        print(f"{ratio:.3f}", kind, setting, parts.by_name)
        assert parts.host == pytest.approx(found["host"], rel=PLAN_BYTES)
        if not 1 - PLAN_SHORT <= ratio <= 1 + PLAN_LONG:
            off[kind, setting["dtype"]] = ratio
    assert not off

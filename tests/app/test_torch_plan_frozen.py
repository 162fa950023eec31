"""`plan` of frozen models with adapters beside PyTorch's own step over simulated ranks: what it predicts and what is held."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.plan.decoder import MODELS, Decoder
from shared_specs.app.plan.held import Held
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_HOST, PLAN_LONG, PLAN_OVER, PLAN_SHORT, PLAN_UNDER
from tests.app.test_torch_plan_drawn import drawn

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
LAYERS, HEAD = 256, 32000  # entries of the vocabulary with which a layer or the loss is the peak
SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=LAYERS)
# Drawn settings of a test, tests, and the numbers of settings of which the first is drawn, and each.
PART, PARTS, FIRST, EACH = 20, 5, 1000, 80
ATTENTION, ALL, NORMS = ["self_attn"], ["self_attn", "mlp"], ["norms"]
HALF = ["bfloat16"]  # all is trained, and in 16 bits
# scope, tokens, dtype, vocabulary, device; the parts of a layer whose projections have adapters, or norms that are trained
CASES: list[tuple[Any, ...]] = [
    ("block", 16384, "bfloat16", LAYERS, "gpu", ATTENTION),
    ("block", 16384, "float32", LAYERS, "cpu", ALL),
    ("block", 4096, "bfloat16", HEAD, "gpu", ALL),
    ("block", 16384, "bfloat16", LAYERS, "gpu", NORMS),
    ("mlp", 4096, "bfloat16", LAYERS, "gpu", ATTENTION),
    ("mlp", 4096, "float32", LAYERS, "cpu", ALL),
    ("mlp", 4096, "bfloat16", HEAD, "gpu", NORMS),
    ("none", 4096, "bfloat16", HEAD, "gpu", ALL),
]


def simulated(cases: list[tuple[Decoder, Setting, list[str]]]) -> list[dict[str, Any]]:
    """What is held in every case, in order, and the sizes that `plan` reads from its model."""
    given = json.dumps([(asdict(decoder), asdict(setting), places) for decoder, setting, places in cases])
    run = subprocess.run(
        [sys.executable, "-m", "tests.app.torch_frozen_steps"], input=given, cwd=ROOT, capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def case(of: tuple[Any, ...]) -> tuple[Decoder, Setting, list[str]]:
    scope, tokens, dtype, vocab, device, places = of
    setting = Setting(
        tokens=tokens, gpus=8, optimizer="sgd", shard_tokens=1024, scope=scope, dtype=dtype, device=device, kernels=False,
        offload=tokens > 4096 and device == "gpu",
    )  # fmt: skip
    return replace(SMALL, vocab=vocab), setting, places


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "of", [CASES[::3], pytest.param(CASES[1::3] + CASES[2::3], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_bytes_of_a_frozen_model(of: list[tuple[Any, ...]]) -> None:
    """Its weights, and of what is trained alone gradients and sums."""
    given = [case(each) for each in of]
    for (_, setting, places), found in zip(given, simulated(given), strict=True):
        sizes = found["decoder"]
        parts = parts_of(Decoder(**sizes | {"held": Held(**sizes["held"])}), setting)
        ratio = (parts.total - RESERVE) / found["device"]
        print(f"{ratio:.3f}", setting, places, parts.by_name)
        assert 1 - PLAN_SHORT <= ratio <= 1 + PLAN_LONG


def drawn_frozen(number: int) -> tuple[str, Setting, list[str]]:
    """The setting of a number: a published dense model, what is set, and what of its layers has adapters or is trained.

    Models of the last numbers are trained as a whole, and all their parameters are in 16 bits.
    """
    draws = (drawn(FIRST + EACH * number + more) for more in count())
    name, setting = next(found for found in draws if not MODELS[found[0]].experts and found[1].tensor == 1)
    own = min(setting.tokens // setting.context, 16384)
    places = random.Random(number).choice((ATTENTION, ALL, ["mlp"], NORMS))
    setting = replace(setting, tokens=own * setting.context, optimizer="sgd")
    return (name, setting, places) if number < EACH else (name, replace(setting, dtype="bfloat16"), HALF)


def test_drawn_settings_are_of_every_kind() -> None:
    settings = [drawn_frozen(number) for number in range(PART * PARTS)]
    assert len({str(setting) for setting in settings}) > 0.95 * len(settings)
    assert len({name for name, _, _ in settings}) > 0.7 * sum(decoder.experts == 0 for decoder in MODELS.values())
    assert len({(setting.context_kind, setting.scope) for _, setting, _ in settings}) == 9
    assert len({(setting.dtype, setting.offload, setting.host_state) for _, setting, _ in settings}) == 8
    assert len({(setting.scope, *places) for _, setting, places in settings}) == 15


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((1, 73, 91), marks=pytest.mark.deep),
        *(pytest.param(range(PART * part, PART * (part + 1)), marks=pytest.mark.slow) for part in range(PARTS)),
    ],
    ids=["few", *map(str, range(PARTS))],
)
@pytest.mark.timeout(3600)
def test_bytes_of_drawn_models(numbers: Any) -> None:
    """Ratios of what is predicted to what is held, on the device and on the host, of published models at real size."""
    given = [drawn_frozen(number) for number in numbers]
    wrong = []
    for number, (name, setting, places), found in zip(
        numbers, given, simulated([(MODELS[name], *more) for name, *more in given]), strict=True
    ):
        sizes = found["decoder"]
        parts = parts_of(Decoder(**sizes | {"held": Held(**sizes["held"])}), setting)
        device = (parts.total - RESERVE) / found["device"]
        host = parts.host / found["host"] if found["host"] else 1.0 + parts.host
        print(number, name, places, f"{device:.4f} {host:.4f}", setting)
        if not (1 - PLAN_UNDER <= device <= 1 + PLAN_OVER and abs(host - 1) <= PLAN_HOST):
            wrong.append((number, name, places, round(device, 4), round(host, 4), setting))
    assert not wrong

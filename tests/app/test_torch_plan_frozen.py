"""`plan` of frozen models with adapters beside PyTorch's own step over simulated ranks: what it predicts and what is held."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.held import Held
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_LONG, PLAN_SHORT

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
LAYERS, HEAD = 256, 32000  # entries of the vocabulary with which a layer or the loss is the peak
SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=LAYERS)
ATTENTION, ALL, NORMS = ["self_attn"], ["self_attn", "mlp"], ["norms"]
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

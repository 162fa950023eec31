"""`plan` of published models in PyTorch beside simulated ranks, in 300 settings drawn by chance."""

import random
from typing import Any

import pytest

from shared_specs.app.plan.decoder import MODELS, Decoder
from shared_specs.app.plan.setting import Setting
from shared_specs.app.plan.step import RESERVE, parts_of
from shared_specs.tolerances import PLAN_HOST, PLAN_OVER, PLAN_UNDER
from tests.app.test_torch_plan import simulated

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(3600)
PART, PARTS = 30, 10


def _context(draw: random.Random, decoder: Decoder, left: int, tensor: int) -> dict[str, Any]:
    """Ranks of a context, and how they share attention."""
    ranks = draw.choice([count for count in (1, 2, 4, 8) if left % count == 0])
    kind, inside = "ulysses", 1
    if ranks > 1:
        kind = draw.choice(("ulysses", "ring", "2d"))
        if kind == "2d":
            fit = [n for n in (2, 4) if ranks % n == 0 and n < ranks and decoder.heads // tensor % n == 0]
            kind, inside = ("2d", draw.choice(fit)) if fit else ("ring", 1)
        if kind == "ulysses" and decoder.heads // tensor % ranks:
            kind = "ring"
    return {"context": ranks, "context_kind": kind, "inside": inside}


def _is_simulated(decoder: Decoder, setting: Setting) -> bool:
    """Return whether the ranks run it, in the time of a test, as the formulas count it.

    Heads are whole, and fused projections too. An expert has the rows of a shard, as many as the formulas count however hot one
    is, although simulated tokens are shared evenly. Of 128 experts a step takes minutes; untiled ones are products that PyTorch
    has in bfloat16 alone.
    """
    if decoder.heads % setting.tensor or decoder.kv_heads % setting.tensor:
        return False
    if decoder.uncut and setting.context * setting.tensor > 1:
        return False
    if not decoder.experts:
        return True
    if setting.scope == "none":
        return setting.dtype == "bfloat16"
    return decoder.experts <= 8 and setting.own_rows * decoder.chosen >= decoder.experts * setting.shards.longest


def drawn(number: int) -> tuple[str, Setting]:
    """The setting of a number: a model, ranks and how they share it, what is tiled, and where what is kept lies."""
    draw = random.Random(number)
    while True:
        name = draw.choice(list(MODELS))
        decoder, gpus = MODELS[name], draw.choice((1, 2, 4, 8))
        fit = [ranks for ranks in (1, 1, 1, 2, 4) if gpus % ranks == 0 and (not decoder.experts or ranks == 1)]
        tensor = draw.choice(fit)
        context = _context(draw, decoder, gpus // tensor, tensor)
        scope = "block" if tensor > 1 else draw.choice(("block", "block", "mlp", "none"))
        own = draw.choice((8192, 16384, 32768, 65536))
        setting = Setting(
            tokens=(min(own, 16384) if scope == "none" else own) * context["context"],
            gpus=gpus,
            tensor=tensor,
            scope=scope,
            host_state=draw.random() < 0.15,
            offload=draw.random() < 0.5,
            dtype=draw.choice(("bfloat16", "bfloat16", "float32")),
            kernels=False,
            **context,
        )
        if _is_simulated(decoder, setting):
            return name, setting


def test_settings_are_of_every_kind() -> None:
    settings = [drawn(number) for number in range(PART * PARTS)]
    assert len(set(settings)) > 0.95 * len(settings)
    assert {name for name, _ in settings} == set(MODELS)
    for field, least in (
        ("context_kind", 3),
        ("scope", 3),
        ("tensor", 3),
        ("context", 4),
        ("offload", 2),
        ("host_state", 2),
    ):
        assert len({getattr(setting, field) for _, setting in settings}) == least


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((2, 6, 13), marks=pytest.mark.deep),
        *(pytest.param(range(PART * part, PART * (part + 1)), marks=pytest.mark.slow) for part in range(PARTS)),
    ],
    ids=["few", *map(str, range(PARTS))],
)
def test_bytes_of_drawn_settings(numbers: Any) -> None:
    """Ratios of what is predicted to what is held, on the device and on the host."""
    given = [drawn(number) for number in numbers]
    wrong = []
    for number, (name, setting), found in zip(
        numbers, given, simulated([(MODELS[name], setting) for name, setting in given]), strict=True
    ):
        parts = parts_of(MODELS[name], setting)
        device = (parts.total - RESERVE) / found["device"]
        host = parts.host / found["host"] if found["host"] else 1.0 + parts.host
        print(number, name, f"{device:.4f} {host:.4f}", setting)
        if not (1 - PLAN_UNDER <= device <= 1 + PLAN_OVER and abs(host - 1) <= PLAN_HOST):
            wrong.append((number, name, round(device, 4), round(host, 4), setting))
    assert not wrong

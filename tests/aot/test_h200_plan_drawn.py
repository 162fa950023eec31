"""`plan` of published models in JAX beside programs compiled for one H200 to thirty-two, in 120 settings drawn by chance."""

import random
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.app.plan.decoder import MODELS, Decoder, tensor_ranks
from shared_specs.app.plan.simulated import predicted_device, simulated_step
from shared_specs.app.plan.step import Setting, parts_of
from shared_specs.tolerances import PLAN_HOST, PLAN_OVER_XLA, PLAN_UNDER
from tests.models.jax_adapters import ATTENTION, MLP, adapt
from tiled_jax.commands.plan import simulate
from tiled_jax.commands.plan.simulate import SIMULATOR
from tiled_jax.plan.sizes import decoder_of_model

pytestmark = pytest.mark.timeout(3600)
# Drawn settings of a test, tests, and of how many settings the model has adapters, the last ones.
PART, PARTS, ADAPTED = 15, 8, 30
ROOM = 100 * 2**30  # of an H200, for parameters with their state and for inputs; the rest is for the step
PLACES = (ATTENTION, MLP, ATTENTION + MLP, ("q", "v"))


def _context(draw: random.Random, decoder: Decoder, left: int, tensor: int) -> dict[str, Any]:
    """Ranks of a context, and how they share attention."""
    ranks = draw.choice([left, *(count for count in (1, 2, 4, 8, 16) if left % count == 0)])
    fit = [n for n in (2, 4) if ranks % n == 0 and n < ranks and decoder.heads // tensor % n == 0]
    kinds = ["ring"] + ["2d"] * bool(fit) + ["ulysses"] * (decoder.heads // tensor % ranks == 0)
    kind = draw.choice(kinds) if ranks > 1 else "ulysses"
    return {"context": ranks, "context_kind": kind, "inside": draw.choice(fit) if kind == "2d" else 1}


def drawn(number: int) -> tuple[str, Setting, tuple[str, ...]]:
    """The setting of a number, one with room on these GPUs: a model, devices and how they share it, and which of its
    projections have adapters, () none."""
    draw = random.Random(number)
    adapted = number >= PART * PARTS - ADAPTED
    while True:
        name = draw.choice(list(MODELS))
        decoder, gpus = MODELS[name], draw.choice((1, 2, 4, 8, 8, 32))
        ranks = tensor_ranks(decoder, gpus, "jax")
        tensor = draw.choice([1, 1, *ranks]) if ranks and not adapted else 1
        if not ranks or (adapted and decoder.experts) or (name == "phi-4" and adapted):
            continue
        context = _context(draw, decoder, gpus // tensor, tensor)
        setting = Setting(
            tokens=draw.choice((8192, 16384, 32768, 65536, 131072)) * context["context"],
            gpus=gpus,
            tensor=tensor,
            offload=draw.random() < 0.5,
            dtype=draw.choice(("bfloat16", "bfloat16", "float32")),
            half="jax",
            **context,
        )
        places = draw.choice(PLACES) if adapted else ()
        kept = 0 if setting.offload else decoder.inputs * setting.own_rows * decoder.hidden * 4
        if (4 if adapted else 16) * decoder.parameters // gpus + kept < ROOM:
            return name, setting, places


def decoder_with(name: str, setting: Setting, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The sizes of a model, which has adapters in places and is then trained there alone, also where it is simulated."""
    if not places:
        return MODELS[name]
    plain = simulate.model_of

    def adapted(sizes: Decoder, setting: Setting) -> Any:
        model = plain(sizes, setting)
        adapt(model.layers, places, jnp.dtype(setting.dtype))
        return model

    monkeypatch.setattr(simulate, "model_of", adapted)
    monkeypatch.setattr(simulate, "parallelize", partial(simulate.parallelize, wrt=nnx.LoRAParam))
    shapes = nnx.eval_shape(lambda: adapted(MODELS[name], setting))
    return decoder_of_model("plan", shapes, nnx.LoRAParam)


def test_settings_are_of_every_kind() -> None:
    settings = [drawn(number) for number in range(PART * PARTS)]
    assert len({str(each) for each in settings}) > 0.95 * len(settings)
    assert len({name for name, _, _ in settings}) > 0.7 * len(MODELS)
    for field, least in (("context_kind", 3), ("tensor", 4), ("context", 6), ("gpus", 5), ("offload", 2), ("dtype", 2)):
        assert len({getattr(setting, field) for _, setting, _ in settings}) == least
    assert {places for _, _, places in settings} == {(), *PLACES}


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((28, 37, 63, 99), id="few"),
        *(pytest.param(range(PART * part, PART * (part + 1)), marks=pytest.mark.slow) for part in range(PARTS)),
    ],
)
def test_bytes_of_drawn_settings(numbers: Any) -> None:
    """Ratios of what is predicted to what the program takes. A compilation takes seconds."""
    wrong = []
    for number in numbers:
        name, setting, places = drawn(number)
        with pytest.MonkeyPatch.context() as monkeypatch:
            decoder = decoder_with(name, setting, places, monkeypatch)
            found = simulated_step(decoder, setting, SIMULATOR)
        ratio = predicted_device(decoder, SIMULATOR.setting_simulated(setting)) / found.device
        host = parts_of(decoder, setting).host / found.host if found.host else 1.0 + parts_of(decoder, setting).host
        print(number, name, places, f"{ratio:.4f} {host:.4f}", setting)
        if not (1 - PLAN_UNDER <= ratio <= 1 + PLAN_OVER_XLA and abs(host - 1) <= PLAN_HOST):
            wrong.append((number, name, places, round(ratio, 4), round(host, 4), setting))
    assert not wrong

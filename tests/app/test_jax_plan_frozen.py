"""`plan` of a model of which a part is trained beside what XLA says of the JAX half's own step."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_COMPILED
from tests.models.jax_adapters import adapt
from tiled_jax.commands.plan import simulate
from tiled_jax.plan.sizes import decoder_of_model

pytestmark = pytest.mark.ranks

SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=256)
NORMS = nnx.All(nnx.Param, nnx.PathContains("scale"))
MODEL_OF = simulate.model_of
ALL = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION = nnx.All(nnx.Param, nnx.PathContains("attention"))


def with_adapters(decoder: Decoder, setting: Setting) -> Any:
    """The simulated model with adapters around every projection of attention and the MLP."""
    model = MODEL_OF(decoder, setting)
    adapt(model.layers, ALL, jnp.dtype(setting.dtype))
    return model


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("wrt", "vocab", "gpus", "make"),
    [
        (NORMS, 256, 8, MODEL_OF),
        (nnx.LoRAParam, 256, 8, with_adapters),
        (NORMS, 32000, 8, MODEL_OF),
        (ATTENTION, 256, 1, MODEL_OF),
        (nnx.LoRAParam, 256, 1, with_adapters),
        (nnx.LoRAParam, 32000, 8, with_adapters),
    ],
    ids=["norms", "adapters", "head", "attention", "adapters of one device", "head beside adapters"],
)
def test_bytes_of_a_frozen_model(monkeypatch: pytest.MonkeyPatch, wrt: Any, vocab: int, gpus: int, make: Any) -> None:
    """Its weights, and of what is trained alone gradients and sums."""
    monkeypatch.setattr(simulate, "model_of", make)
    setting = Setting(
        tokens=4096, gpus=gpus, shard_tokens=1024, dtype="float32", optimizer="sgd", device="cpu", half="jax"
    )
    sizes = replace(SMALL, vocab=vocab)
    model = nnx.eval_shape(lambda: simulate.model_of(sizes, setting))
    monkeypatch.setattr(simulate, "parallelize", partial(simulate.parallelize, wrt=wrt))
    found, decoder = simulate.simulate(sizes, setting), decoder_of_model("plan", model, wrt)
    predicted = parts_of(decoder, setting).total - RESERVE
    print(f"{predicted / found.device:.3f}", found, parts_of(decoder, setting).by_name)
    assert predicted == pytest.approx(found.device, rel=PLAN_COMPILED)

"""`plan` of a model of which a part is trained beside what XLA says of the JAX half's own step."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from flax import nnx

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_COMPILED
from tiled_jax.commands.plan import simulate
from tiled_jax.plan.sizes import decoder_of_model

pytestmark = pytest.mark.ranks

SMALL = Decoder(hidden=512, intermediate=1792, layers=3, heads=8, kv_heads=4, head_dim=64, vocab=256)
NORMS = nnx.All(nnx.Param, nnx.PathContains("scale"))
ATTENTION = nnx.All(nnx.Param, nnx.PathContains("attention"))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("wrt", "vocab", "gpus"),
    [(NORMS, 256, 8), (NORMS, 32000, 8), (ATTENTION, 256, 1)],
    ids=["norms", "head", "attention"],
)
def test_bytes_of_a_frozen_model(monkeypatch: pytest.MonkeyPatch, wrt: Any, vocab: int, gpus: int) -> None:
    """Its weights, and of what is trained alone gradients and sums."""
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

"""The float8 option of `parallelize` with torchao itself, its products emulated on a CPU. Only `make float8` collects this.

Which layers are converted, and what is refused, is in tests/plans/test_torch_float8.py.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from shared_specs.config import Checkpointing, Compile, ParallelConfig
from shared_specs.tolerances import FACTOR, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tests.float8.ranks_torchao import CONFIGS, LAYERS, emulated, gradients, model_of
from tests.models.torch_decoders import batch, loss_of
from tests.plans.ranks_torch_plans import error_between
from tests.ranks import Ranks
from tiled_torch.parallel import parallelize


@pytest.fixture
def convert() -> Iterator[Any]:
    with emulated() as found:
        yield found


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(world=2) as ranks:
        yield ranks


def converted(model: Any) -> int:
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


@pytest.mark.parametrize("mode", ["full", "products"])
def test_what_torchao_makes_of_the_same_model(convert: Any, mode: Any) -> None:
    """Recomputed or not, to the last bit; "products" keeps some."""
    theirs, ours = model_of(), model_of()
    convert(theirs.model.layers)
    parallelize(ours, None, ParallelConfig(float8=True, checkpointing=Checkpointing(mode=mode)))
    kept, found = [], []
    for model in (theirs, ours):
        with LiveBytes() as live:
            loss = loss_of(model, *batch(), inside=True, cache=False)
            kept.append(live.now)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert converted(ours) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept[1] < kept[0]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    theirs, ours = model_of(), model_of()
    convert(theirs.model.layers)
    parallelize(ours, None, ParallelConfig(float8=True, compile=Compile()))
    (expected_loss, expected), (loss, found) = gradients(theirs), gradients(ours)
    assert converted(ours) == LAYERS
    assert abs(loss - expected_loss) <= MODEL_FLOAT32 * expected_loss
    _, exact = gradients(model_of())
    # What float32 rounds otherwise, float8 may round to the other side, and is then off by a digit of its own.
    assert error_between(found, exact) <= FACTOR * error_between(expected, exact)


@pytest.mark.parametrize("name", CONFIGS)
def test_on_two_ranks(two: Ranks, name: str) -> None:
    """Scales are of whole tensors, split or not: the same products as on one process."""
    for answer in two.run("tests.float8.ranks_torchao:whole_model", name=name):
        assert answer["layers"] == LAYERS
        assert answer["loss"] <= MODEL_FLOAT32
        assert answer["between"] <= MODEL_FLOAT32


def test_tiled_models(convert: Any, two: Ranks) -> None:
    """Scales are of a shard: other roundings than of the whole, and no larger ones."""
    for answer in two.run("tests.float8.ranks_torchao:whole_model", name="fsdp", tiled=True):
        assert answer["layers"] == LAYERS
        assert 0 < answer["between"]
        assert answer["ours"] <= FACTOR * answer["theirs"]

"""Right ways of training, in every combination, of which `check` must not say that something differs."""

import pytest

pytest.importorskip("transformers")

from tests.check.torch_setups import EVERY, FAMILIES, FEW, WAYS
from tiled_torch import check

# What is left untiled where adapters are is told by a warning, which is no matter of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:tile_model|.*stays? as|.*untiled:UserWarning")


@pytest.mark.deep_but(5)
@pytest.mark.parametrize("setup", FEW, ids=str)
def test_a_right_training_is_equal(setup):
    report = check(**setup.arguments())
    assert report.equal, str(report)


def test_the_few_go_through_all_that_there_is():
    assert {s.family for s in FEW} == set(FAMILIES)
    assert {s.way for s in FEW} == set(WAYS)
    assert len({(s.scope, s.checkpointing) for s in FEW}) == 4
    assert len({s.dtype for s in FEW}) == 3
    assert len(set(EVERY)) == 336


@pytest.mark.deep
@pytest.mark.parametrize("setup", [setup for setup in EVERY if setup not in FEW], ids=str)
def test_every_right_training_is_equal(setup):
    report = check(**setup.arguments())
    assert report.equal, str(report)

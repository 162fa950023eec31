"""Ring attention on gloo ranks: values and gradients of one process, and the bytes that are sent."""

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.layers.ranks_torch_ring import CASES
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

_HERE = "tests.layers.ranks_torch_ring:"


def check_all(ranks):
    for found in ranks.run(_HERE + "equal", names=[*CASES]):
        assert found.keys() == CASES.keys()
        assert all(error <= DISTRIBUTED_FLOAT64 for error in found.values()), found


def test_equals_one_process(pools):
    check_all(pools[2])
    check_all(pools[4])


@pytest.mark.slow
def test_equals_one_process_on_eight_ranks():
    with Ranks(8) as eight:
        check_all(eight)


def test_rings_of_ranks_that_exchange_heads(pools):
    for found in pools[4].run(_HERE + "two_axes"):
        assert len(found) == 3
        assert all(error <= DISTRIBUTED_FLOAT64 for error in found.values()), found


def test_bfloat16(pools):
    for found in pools[2].run(_HERE + "rounded"):
        for errors, baseline in found.values():
            assert all(error <= limit(plain, "bfloat16") for error, plain in zip(errors, baseline, strict=True)), found


def test_what_is_sent(pools):
    """Keys and values R - 1 times forward and backward, their gradients as often, in the dtype of sums."""
    for world in (2, 4):
        for found in pools[world].run(_HERE + "sent"):
            assert all(counted == formula > 0 for counted, formula in found.values()), found

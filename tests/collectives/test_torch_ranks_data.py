"""broadcast_data over gloo ranks: what arrives, how much is sent, and that a fault on one rank is an error on all."""

import pytest
import torch

from shared_specs import UnsupportedError
from tests.ranks import Ranks
from tiled_torch.parallel import broadcast_data

pytestmark = pytest.mark.ranks


@pytest.fixture
def four(pools: dict[int, Ranks]) -> Ranks:
    return pools[4]


@pytest.mark.parametrize(
    ("world", "group"), [(2, "default"), (2, "mesh"), *((4, g) for g in ("default", "mesh", "subset", "mesh dim"))]
)
def test_every_rank_gets_what_rank_0_of_its_group_has(pools, world, group):
    found = pools[world].run("tests.collectives.ranks_torch_data:received", group=group)
    answers = [one for one in found if one is not None]
    assert len(answers) == (2 if group == "subset" else world)
    for answer in answers:
        # int64, bool, float32 and bfloat16
        assert answer == {"same": True, "kinds": True, "order": True, "gradients": False, "broadcasts": 4}


def test_expected_tensors_are_replaced(four):
    assert four.run("tests.collectives.ranks_torch_data:of_one_dtype") == [[[0, 1, 2], [[0, 0], [0, 0]]]] * 4


def test_a_group_of_one_is_free(four):
    assert four.run("tests.collectives.ranks_torch_data:alone") == [True] * 4


REFUSED = {
    "missing": "data['b'] must be a tensor on rank 0, got nothing.",
    "dtype": "data['b'] must be of dtype torch.float32, got torch.float64 on rank 0.",
    "keys": "keys must be the same on every rank (['a', 'b'] on rank 0), got ['a'] on rank 3.",
    "other keys": "keys must be the same on every rank (['a', 'b'] on rank 0), got ['a', 'c'] on rank 3.",
    "dtypes": "dtype must be the same on every rank (torch.float32 on rank 0), got torch.float64 on rank 3.",
    "shape": "data['a'] must be [2, 3] as on rank 0, got [3, 2] on rank 3.",
    "expected dtype": "data['a'] must be of dtype torch.float32, got torch.float64 on rank 3.",
    "no data": "data must be a mapping, got NoneType. This is rank 0 of 4.",
    "kind of data": "data must be a mapping or None, got list. This is rank 3 of 4.",
    "kind of keys": "keys must be a sequence of strings, got 'ab'. This is rank 3 of 4.",
    "twice": "keys must be different from each other, got ['a', 'a']. This is rank 3 of 4.",
    "kind of tensor": "data['a'] must be a plain tensor, got list. This is rank 0 of 4.",
    "none": "data['a'] must be a plain tensor, got NoneType. This is rank 0 of 4.",
    "kind of dtype": "dtype must be a torch.dtype or None, got str. This is rank 3 of 4.",
    "device": "device must be one that this rank can use, or None, got 'gpu'. Expected one of cpu, ",
}


@pytest.mark.parametrize(("world", "group"), [(4, "default"), (2, "default"), (4, "subset")])
def test_a_fault_on_one_rank_is_the_same_error_on_all(pools, world, group):
    """The text says which rank of the group it is; the ranks outside hear nothing of it."""
    found = pools[world].run("tests.collectives.ranks_torch_data:refused", kinds=list(REFUSED), group=group)
    answers = [one for one in found if one is not None]
    ranks = 2 if group == "subset" else world
    assert answers == answers[:1] * ranks
    assert list(answers[0]) == list(REFUSED)
    for what, message in answers[0].items():
        expected = f"broadcast_data: {REFUSED[what]}".replace("rank 3", f"rank {ranks - 1}").replace(
            "of 4", f"of {ranks}"
        )
        assert message.startswith(expected)
        assert message == expected or what == "device"  # there torch lists the kinds of devices


@pytest.mark.deep
def test_a_rank_that_makes_no_call_does_not_hang_the_others(four):
    first, *others = four.run("tests.collectives.ranks_torch_data:late", seconds=2)
    assert first == "no call"
    for rank, message in enumerate(others, 1):
        assert message.startswith(
            f"broadcast_data: all-gather failed on rank {rank} of 4. Every rank of the group (ranks 0, 1, 2, 3 of all) has "
        )


def test_without_a_process_group():
    with pytest.raises(UnsupportedError, match=r"^broadcast_data: group must be usable here"):
        broadcast_data(["a"], {"a": torch.ones(2)})

"""Megatron-core's tensor parallelism by its own names over gloo ranks, against one process."""

from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks
RANKS = "tests.compat.ranks_torch_megatron"


@pytest.fixture
def two(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


def check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["drawn"] == 0
        assert answer["error"] <= DISTRIBUTED_FLOAT64
        assert answer["returned"]
        assert answer["zero"]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "flags", [{}, {"bias": False}, {"gather_output": True}, {"skip_bias_add": True}, {"stride": 2}], ids=str
)
def test_column(two: Ranks, sequence: bool, flags: dict[str, Any]) -> None:
    check(two.run(f"{RANKS}:column", sequence=sequence, flags=flags))


@pytest.mark.parametrize(
    ("sequence", "flags"),
    [
        (False, {}),
        (False, {"input_is_parallel": False}),
        (False, {"skip_bias_add": True}),
        (False, {"stride": 3}),
        (True, {}),
        (True, {"skip_bias_add": True}),
    ],
    ids=str,
)
def test_row(two: Ranks, sequence: bool, flags: dict[str, Any]) -> None:
    check(two.run(f"{RANKS}:row", sequence=sequence, flags=flags))


def test_embedding(two: Ranks) -> None:
    for rank, answer in enumerate(two.run(f"{RANKS}:embedding")):
        assert answer["errors"] == [0, 0]
        assert answer["span"] == [6 * rank, 6 * rank + 6]
        assert "global_vocab_size must be a multiple of the 2 ranks it is split over, got 13" in answer["odd"]
        assert answer["marks"] == [True, 0, 1, True]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_label_smoothing(two: Ranks, smoothing: float) -> None:
    assert max(two.run(f"{RANKS}:loss", smoothing=smoothing)) <= DISTRIBUTED_FLOAT64


def test_mappings(two: Ranks) -> None:
    for answer in two.run(f"{RANKS}:regions"):
        assert answer == dict.fromkeys(answer, True)
        assert len(answer) == 12


def test_functional_forms(two: Ranks) -> None:
    for answer in two.run(f"{RANKS}:functional"):
        assert answer.pop("untouched")
        assert answer.pop("main_grad")
        assert answer.pop("grad")
        assert max(answer.values()) <= DISTRIBUTED_FLOAT64


def test_state_and_refusals(two: Ranks) -> None:
    for answer in two.run(f"{RANKS}:state"):
        assert answer["keys"] == ["weight", "bias", "_extra_state"]
        assert answer["loads"] == ["<All keys matched successfully>"] * 2
        assert answer["master"] == [12, 6]
        assert answer["lent"] <= DISTRIBUTED_FLOAT64
        assert all("ColumnParallelLinear: weight must be [6, 6], got" in text for text in answer["bare"])
        assert answer["marks"] == [[True, 0, 1, True], [True, 0, 1, True], [True, 1, 1, True]]
        assert answer["partial"] <= DISTRIBUTED_FLOAT64
        assert answer["beside"]
        for text, part in zip(
            answer["refused"],
            (
                "bias",
                "grad_output_buffer",
                "output_dtype",
                "config.defer_embedding_wgrad_compute",
                "config.cpu_offloading",
            ),
            strict=True,
        ):
            assert part in text


def test_streams(two: Ranks) -> None:
    for answer in two.run(f"{RANKS}:streams"):
        assert answer["kept"]
        assert answer["seeded"] == dict.fromkeys(
            ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"), True
        )
        assert answer["drawn"]
        assert answer["again"] == [True, True]


def test_groups(pools: dict[int, Ranks]) -> None:
    for rank, answer in enumerate(pools[4].run(f"{RANKS}:groups_of_two")):
        first = rank - rank % 2
        assert answer["sum"] == answer["mesh"] == 2 * first + 1
        assert answer["all"] == 6
        assert (answer["rank"], answer["expert"]) == (rank % 2, 1)
        assert answer["keys"] == {"7": [first], "a": [first + 10]}
        assert answer["chunk"] == [[0, 1, 2], [3, 4, 5]][rank % 2]
        assert answer["joined"] == [0, 1, 2, 3, 4, 5]
        assert answer["marks"] == [True, 0, 1, False]

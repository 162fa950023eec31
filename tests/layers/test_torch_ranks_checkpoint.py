"""Dropout across ranks, and checkpointing whose inputs are kept in parts, over gloo ranks. See ranks_checkpoint.py."""

from itertools import combinations
from typing import Any

import pytest

from shared_specs.layers.random import RANDOM_STREAMS
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_checkpoint:{function}", **arguments)


@pytest.mark.parametrize(
    ("world", "axes"),
    [
        *((2, [axis]) for axis in ("data", "tensor", "expert")),
        (4, ["data", "tensor"]),
        (4, ["tensor", "expert"]),
        (4, ["tensor"]),
    ],
    ids=str,
)
def test_dropout_agrees_exactly_where_it_should(pools, world, axes):
    """Outside of forks and in every stream: equal masks on two ranks if and only if they differ in no axis of the stream."""
    answers = run(pools, world, "dropout", axes=axes)
    assert len({tuple(sorted(answer["place"].items())) for answer in answers}) == world
    for stream, differing in {"default": ("data",), **RANDOM_STREAMS}.items():
        for one, other in combinations(answers, 2):
            same = all(one["place"].get(axis) == other["place"].get(axis) for axis in differing)
            for first, second in zip(one["masks"][stream], other["masks"][stream], strict=True):
                assert (first == second) == same, (stream, one["place"], other["place"])
    for answer in answers:
        assert answer["recomputed"]
        drawn = [tuple(mask) for masks in answer["masks"].values() for mask in masks]
        assert len(set(drawn)) == len(drawn) == 8, "two streams, or two calls, drew the same numbers"


def assert_parted(answer: dict[str, Any]) -> None:
    """The same gradients; three inputs in parts; one all-gather each, in backward only, but for one of samples to compare."""
    assert max(answer["errors"]) == 0.0
    assert answer["whole"]["collectives"] == [0, 0]
    assert answer["parted"]["collectives"] == [1, 3]
    elements, size = answer["input"] // 8, answer["size"]
    saved = 3 * (answer["input"] - 8 * -(-elements // size))
    assert answer["whole"]["held"] - answer["parted"]["held"] == saved


@pytest.mark.parametrize("tokens", [7, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_inputs_are_kept_in_parts(pools, world, tokens):
    """Exact bytes; with 7 tokens of 24 the parts of 4 ranks are equal, and cut rows in two."""
    for answer in run(pools, world, "partitioned", tokens=tokens):
        assert_parted(answer)


@pytest.mark.deep
@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_peak_bytes_of_inputs_in_parts(pools, world, layers):
    """Of a backward: those of one layer that is computed again are gathered while those of the layer after it are still there,
    and one part of theirs is gone. gloo's threads may still hold the numbers that ranks compared."""
    for answer in run(pools, world, "peaks", layers=layers):
        (held, peak), (parts, lower) = answer["whole"], answer["parted"]
        part = answer["input"] // world
        assert held - parts == layers * (answer["input"] - part)
        saved = layers * answer["input"] - (layers - 1) * part - 2 * answer["input"]
        assert 0 <= saved - (peak - lower) <= 8 * (world + 1)


@pytest.mark.parametrize("group", ["subset", "mesh", "mesh dim"])
def test_groups(pools, group):
    answers = [answer for answer in run(pools, 4, "partitioned", group=group) if answer is not None]
    assert len(answers) == (2 if group == "subset" else 4)
    for answer in answers:
        assert_parted(answer)


@pytest.mark.parametrize("world", [2, 4])
def test_bfloat16(pools, world):
    for answer in run(pools, world, "partitioned", dtype="bfloat16"):
        assert max(answer["errors"]) == 0.0


@pytest.mark.parametrize("world", [2, 4])
def test_without_output_under_fsdp2(pools, world):
    """The unit that is computed again is gathered again, and its gradients are reduced once."""
    for answer in run(pools, world, "fsdp"):
        assert max(answer) <= DISTRIBUTED_FLOAT64


def test_groups_that_cannot_be_used_are_refused_on_every_rank(pools):
    kind = "checkpoint: group must be a process group, a DeviceMesh or None, got int."
    assert run(pools, 2, "refused", what="kind") == [kind] * 2
    mesh = "checkpoint: group must be a mesh of one dim, got one of 2."
    assert run(pools, 2, "refused", what="mesh") == [mesh] * 2

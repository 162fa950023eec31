"""Linear layers over gloo ranks against one process: values, gradients, every option, collectives and their order.

What runs on the ranks is in ranks_layers.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
UNEVEN = {2: [3, 1], 4: [1, 3, 0, 2]}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    with Ranks(world=2) as two, Ranks(world=4) as four:
        yield {2: two, 4: four}


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.on_torch.ranks_layers:{function}", **arguments)


def assert_close(answers: list[Any], results: int = 4) -> None:
    for rank, answer in enumerate(answers):
        assert len(answer["errors"]) == results
        assert not answer["view"]  # fully_shard warns of one
        worst = max(error["ours"] for error in answer["errors"].values())
        assert worst <= DISTRIBUTED_FLOAT64, f"rank {rank}: {answer['errors']}"


SEQUENCE: dict[str, dict[str, Any]] = {
    "even": {"sequence_parallel": True},
    "even dim 1": {"sequence_parallel": True, "sequence_dim": 1},
    "uneven": {"sequence_parallel": True, "sizes": UNEVEN},
    "uneven dim 1": {"sequence_parallel": True, "sequence_dim": 1, "sizes": UNEVEN},
}
COLUMN: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "gathered": {"gather_output": True},
    "gathered, fused": {"gather_output": True, "stride": 2},
    "gathered, three fused, sequence": {"gather_output": True, "stride": 3, "sequence_parallel": True},
    "fused": {"stride": 2},
    "waiting": {"async_grad_reduce": False},
    "unreduced": {"disable_grad_reduce": True},
    "into main_grad": {"gradient_accumulation_fusion": True, "backwards": 3},
    "deferred": {"defer_weight_grad": True, "backwards": 3},
    "deferred, sequence": {"defer_weight_grad": True, "backwards": 2, "sequence_parallel": True, "sizes": UNEVEN},
    "deferred into main_grad": {"defer_weight_grad": True, "gradient_accumulation_fusion": True, "backwards": 3},
    "mesh": {"group": "mesh"},
    "expert": {"group": "mesh", "is_expert": True},
    **SEQUENCE,
    "waiting, uneven": {"sequence_parallel": True, "sizes": UNEVEN, "async_grad_reduce": False},
}
ROW: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "whole input": {"input_is_parallel": False},
    "whole input, fused": {"input_is_parallel": False, "stride": 2},
    "fused": {"stride": 2},
    "into main_grad": {"gradient_accumulation_fusion": True, "backwards": 3},
    "deferred": {"defer_weight_grad": True, "backwards": 3},
    **SEQUENCE,
}
# 8 inputs in 4 ranks x 2 fused parts are single features: enough.


def settings(given: dict[str, Any], world: int) -> dict[str, Any]:
    return {name: value[world] if name == "sizes" else value for name, value in given.items()}


def scaled(answers: list[Any], given: dict[str, Any]) -> None:
    """Gradients of several backwards add up, in x and the bias too."""
    count = given.get("backwards", 1)
    for answer in answers:
        assert answer["deferred"] == (count if given.get("defer_weight_grad") else 0)


@pytest.mark.parametrize("name", COLUMN)
@pytest.mark.parametrize("world", WORLDS)
def test_column(pools, world, name):
    answers = run(pools, world, "linear", kind="column", **settings(COLUMN[name], world))
    assert_close(answers, 4 - (COLUMN[name].get("bias") is False))
    scaled(answers, COLUMN[name])


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize("world", WORLDS)
def test_row(pools, world, name):
    answers = run(pools, world, "linear", kind="row", **settings(ROW[name], world))
    assert_close(answers, 4 - (ROW[name].get("bias") is False))
    scaled(answers, ROW[name])


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_groups_that_are_not_the_world(pools, kind, group):
    given = {"sequence_parallel": True, "sizes": [1, 4]}
    inside = [one for one in run(pools, 4, "linear", kind=kind, group=group, **given) if one is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    assert_close(inside)


@pytest.mark.parametrize("sequence", ["whole", *SEQUENCE])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_bfloat16(pools, kind, sequence):
    """As exact as nn.Linear in bfloat16 on one process, although parts are rounded before they are added over the ranks."""
    given = settings(SEQUENCE.get(sequence, {}), 4)
    for answer in run(pools, 4, "linear", kind=kind, dtype="bfloat16", **given):
        assert answer["dtypes"] == ["torch.bfloat16"]
        for name, error in answer["errors"].items():
            assert error["ours"] <= limit(error["untiled"], "bfloat16"), name


def test_bfloat16_gradients_accumulate_in_float32(pools):
    """Into main_grad: the error does not grow with the number of backwards, and is that of float32 sums."""
    for answer in run(pools, 2, "linear", kind="column", dtype="bfloat16", gradient_accumulation_fusion=True):
        error = answer["errors"]["dweight"]
        assert error["ours"] <= limit(0.0, "float32")
        assert error["ours"] < error["untiled"]


def test_autocast(pools):
    for answer in run(pools, 2, "bfloat16_autocast"):
        assert answer["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        for name in ("y", "dweight"):
            ours, theirs = answer[name]
            assert ours <= limit(theirs, "bfloat16"), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weight_keeps_no_input(pools, sequence_parallel):
    """Only the weight, of 24 / 2 x 8 elements; x has its gradient and the bias too."""
    given = {"kind": "frozen", "frozen": ["weight"], "sequence_parallel": sequence_parallel}
    answers = run(pools, 2, "linear", **given)
    assert_close(answers, 3)
    assert all(answer["kept"] == [96] for answer in answers)


def test_what_is_kept(pools):
    """x as it was given, this rank's 2 of 4 tokens of [*, 3, 8], and the weight."""
    for answer in run(pools, 2, "linear", kind="column", sequence_parallel=True):
        assert answer["kept"] == [48, 96]


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({}, {}, {"allreduce_": 1}),
        ({"frozen": ["x"]}, {}, {}),
        ({"disable_grad_reduce": True}, {}, {}),
        ({"gather_output": True}, {"_allgather_base_": 1}, {"allreduce_": 1}),
        (
            {"sequence_parallel": True},
            {"_allgather_base_": 1},
            {"_allgather_base_": 1, "_reduce_scatter_base_": 1},
        ),
        ({"sequence_parallel": True, "frozen": ["weight"]}, {"_allgather_base_": 1}, {"_reduce_scatter_base_": 1}),
        ({"sequence_parallel": True, "frozen": ["x"]}, {"_allgather_base_": 1}, {"_allgather_base_": 1}),
    ],
    ids=str,
)
def test_collectives_of_a_column(pools, given, forward, backward):
    for answer in run(pools, 2, "linear", kind="column", **given):
        assert answer["collectives"][:2] == [forward, backward]


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({}, {"allreduce_": 1}, {}),
        ({"input_is_parallel": False}, {"allreduce_": 1}, {"_allgather_base_": 1}),
        ({"sequence_parallel": True, "bias": False}, {"_reduce_scatter_base_": 1}, {"_allgather_base_": 1}),
        ({"sequence_parallel": True}, {"_reduce_scatter_base_": 1}, {"_allgather_base_": 1, "allreduce_": 1}),
    ],
    ids=str,
)
def test_collectives_of_a_row(pools, given, forward, backward):
    for answer in run(pools, 2, "linear", kind="row", **given):
        assert answer["collectives"][:2] == [forward, backward]


def test_deferred_gradients_are_left_out_of_backward(pools):
    """Under sequence parallelism x is gathered again for them: once for each call, later."""
    for answer in run(pools, 2, "linear", kind="column", sequence_parallel=True, defer_weight_grad=True, backwards=2):
        assert answer["grad is None"]
        assert answer["collectives"][1:] == [{"_reduce_scatter_base_": 2}, {"_allgather_base_": 2}]


@pytest.mark.parametrize(
    ("sequence_parallel", "asynchronous", "expected"),
    [
        (False, True, ["mm", "allreduce", "mm", "wait"]),
        (False, False, ["mm", "allreduce", "wait", "mm"]),
        (True, True, ["allgather_base", "mm", "reduce_scatter_base", "wait", "mm", "wait"]),
        (True, False, ["allgather_base", "wait", "mm", "reduce_scatter_base", "wait", "mm"]),
    ],
)
def test_the_reduction_travels_under_the_weight_gradient(pools, sequence_parallel, asynchronous, expected):
    """And x under the input gradient: each is waited for only where it is needed."""
    given = {"sequence_parallel": sequence_parallel, "asynchronous": asynchronous}
    assert run(pools, 2, "order", **given) == [expected] * 2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("sizes", ["even", "uneven"])
@pytest.mark.parametrize("world", WORLDS)
def test_two_layers(pools, world, sizes, skip_bias_add, checkpointed):
    """Modules at their own initial values, biases added here or there; every gradient is complete."""
    given = {"sizes": UNEVEN[world] if sizes == "uneven" else None, "skip_bias_add": skip_bias_add}
    for answer in run(pools, world, "mlp", **given, checkpointed=checkpointed):
        assert len(answer) == 6
        assert max(answer.values()) <= DISTRIBUTED_FLOAT64, answer

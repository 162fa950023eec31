"""Linear layers over gloo ranks against one process: values, gradients, every option, collectives and their order.

What runs on the ranks is in ranks_layers.py.
"""

from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
UNEVEN = {2: [3, 1], 4: [1, 3, 0, 2]}


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_layers:{function}", **arguments)


def results(given: dict[str, Any]) -> int:
    """y, and the gradients of what there is and needs one."""
    return 4 - (given.get("bias") is False) - len(given.get("frozen", ()))


def assert_close(name: str, answers: list[Any], given: dict[str, Any]) -> None:
    """Every result, and as many calls left for later as backwards were made."""
    for rank, answer in enumerate(answers):
        assert len(answer["errors"]) == results(given), name
        assert not answer["view"], name  # fully_shard warns of one
        worst = max(error["ours"] for error in answer["errors"].values())
        assert worst <= DISTRIBUTED_FLOAT64, f"{name}, rank {rank}: {answer['errors']}"
        most = given.get("wgrad_deferral_limit") or given.get("backwards", 1)
        assert answer["deferred"] == (most if given.get("defer_weight_grad") else 0), name


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
    "explicit": {"explicit_expert_comm": True},
    "into main_grad": {"gradient_accumulation_fusion": True, "backwards": 3},
    "deferred": {"defer_weight_grad": True, "backwards": 3},
    "deferred, two at most": {"defer_weight_grad": True, "backwards": 3, "wgrad_deferral_limit": 2},
    "two into main_grad": {
        "defer_weight_grad": True,
        "gradient_accumulation_fusion": True,
        "backwards": 3,
        "wgrad_deferral_limit": 2,
    },
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
    "explicit": {"explicit_expert_comm": True, "bias": False},
    "into main_grad": {"gradient_accumulation_fusion": True, "backwards": 3},
    "deferred": {"defer_weight_grad": True, "backwards": 3},
    **SEQUENCE,
}
# 8 inputs in 4 ranks x 2 fused parts are single features: enough.
FROZEN: dict[str, dict[str, Any]] = {
    "plain": {"frozen": ["weight"]},
    "no bias": {"frozen": ["weight"], "bias": False},
    "fused": {"frozen": ["weight"], "stride": 2},
    "unreduced": {"frozen": ["weight"], "disable_grad_reduce": True},
    **{name: {"frozen": ["weight"], **given} for name, given in SEQUENCE.items()},
}
KINDS = {"column": COLUMN, "row": ROW, "frozen": FROZEN}


def settings(given: dict[str, Any], world: int) -> dict[str, Any]:
    return {name: value[world] if name == "sizes" else value for name, value in given.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_option(pools, world, kind):
    """With a frozen weight nothing else is kept: 24 / R x 8 elements."""
    cases = {name: settings(given, world) for name, given in KINDS[kind].items()}
    found = run(pools, world, "linears", kind=kind, cases=cases)
    for name, given in cases.items():
        answers = [answer[name] for answer in found]
        assert_close(name, answers, given)
        assert kind != "frozen" or all(answer["kept"] == [24 // world * 8] for answer in answers), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_groups_that_are_not_the_world(pools, kind, group):
    """Two of four ranks, with every option: the others are not waited for, and two groups side by side do not mix."""
    cases = {name: settings(given, 2) | {"group": group} for name, given in KINDS[kind].items()}
    cases["more on the second"] = cases["uneven"] | {"sizes": [1, 4]}
    inside = [found for found in run(pools, 4, "linears", kind=kind, cases=cases) if found is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    for name, given in cases.items():
        assert_close(name, [found[name] for found in inside], given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16(pools, world, kind):
    """As exact as nn.Linear in bfloat16 on one process, although parts are rounded before they are added over the ranks."""
    cases = {name: settings(given, world) | {"dtype": "bfloat16"} for name, given in KINDS[kind].items()}
    for answers in run(pools, world, "linears", kind=kind, cases=cases):
        assert set(answers) == set(cases)
        for case, answer in answers.items():
            assert answer["dtypes"] == ["torch.bfloat16"]
            assert len(answer["errors"]) == results(cases[case])
            for name, error in answer["errors"].items():
                assert error["ours"] <= limit(error["untiled"], "bfloat16"), (case, name)


def test_deferred_gradients_are_summed_in_float32(pools):
    """Over 64 calls and rounded once; autograd, which adds bfloat16 ones, is past the limit."""
    given = {"dtype": "bfloat16", "backwards": 64}
    cases = {"deferred": given | {"defer_weight_grad": True}, "at once": given}
    for answers in run(pools, 2, "linears", kind="column", cases=cases):
        deferred, at_once = (answers[name]["errors"]["dweight"] for name in cases)
        assert deferred["ours"] <= limit(deferred["untiled"], "bfloat16") < at_once["ours"]


def test_bfloat16_gradients_accumulate_in_float32(pools):
    """Into main_grad: the error does not grow with the number of backwards, and is that of float32 sums."""
    for answer in run(pools, 2, "linear", kind="column", dtype="bfloat16", gradient_accumulation_fusion=True):
        error = answer["errors"]["dweight"]
        assert error["ours"] <= limit(0.0, "float32")
        assert error["ours"] < error["untiled"]


def test_a_main_grad_of_16_bits_is_rounded_once(pools):
    """In each backward, and over 64 deferred calls once: as exact as nn.Linear in bfloat16. One addition a call is past it."""
    given = {"dtype": "bfloat16", "gradient_accumulation_fusion": True, "main_grad": "bfloat16"}
    cases = {
        "one": given,
        "deferred": given | {"backwards": 64, "defer_weight_grad": True},
        "each": given | {"backwards": 64},
    }
    for kind in ("column", "row"):
        for answers in run(pools, 2, "linears", kind=kind, cases=cases):
            one, deferred, each = (answers[name]["errors"]["dweight"] for name in cases)
            assert one["ours"] <= limit(one["untiled"], "bfloat16")
            assert deferred["ours"] <= limit(deferred["untiled"], "bfloat16") < each["ours"]


def test_autocast(pools):
    for answer in run(pools, 2, "bfloat16_autocast"):
        assert answer["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        for name in ("y", "dweight"):
            ours, theirs = answer[name]
            assert ours <= limit(theirs, "bfloat16"), name


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
        ({"explicit_expert_comm": True}, {}, {}),
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
        ({"explicit_expert_comm": True, "bias": False}, {}, {}),
        ({"input_is_parallel": False}, {"allreduce_": 1}, {"_allgather_base_": 1}),
        ({"sequence_parallel": True, "bias": False}, {"_reduce_scatter_base_": 1}, {"_allgather_base_": 1}),
        ({"sequence_parallel": True}, {"_reduce_scatter_base_": 1}, {"_allgather_base_": 1, "allreduce_": 1}),
    ],
    ids=str,
)
def test_collectives_of_a_row(pools, given, forward, backward):
    for answer in run(pools, 2, "linear", kind="row", **given):
        assert answer["collectives"][:2] == [forward, backward]


@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_two_layers_in_groups_that_are_not_the_world(pools, group):
    given = {"sizes": UNEVEN[2], "skip_bias_add": True, "checkpointed": True}
    inside = [found for found in run(pools, 4, "mlp", group=group, **given) if found is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    assert max(max(found.values()) for found in inside) <= DISTRIBUTED_FLOAT64


def test_an_expert_whose_caller_communicates(pools):
    """Tokens gathered before the column layer and reduce-scattered after the row layer, by the caller alone."""
    for found in run(pools, 2, "expert", sizes=UNEVEN[2]):
        assert found.pop("inside") == 0
        assert max(found.values()) <= DISTRIBUTED_FLOAT64


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

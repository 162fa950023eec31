"""Layers of inference over gloo ranks against one process, which path they take, and what they refuse.

The symmetric-memory path itself needs several GPUs (tests/gpu/test_symmetric_memory.py); here its arithmetic runs, with the
buffers that ranks map stood in for. What runs on the ranks is in ranks_inference.py.
"""

import inspect
from typing import Any

import pytest
import torch

from shared_specs.signatures import PARALLEL_SIGNATURES
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks
from tiled_torch import parallel
from tiled_torch.collectives.groups import RankGroup
from tiled_torch.layers import inference_symmetric

pytestmark = pytest.mark.ranks


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_inference:{function}", **arguments)


UNEVEN = {2: [3, 1], 4: [1, 3, 0, 2]}
ONE = {2: [1, 0], 4: [0, 0, 1, 0]}  # one token that is decoded
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "own tokens": {"gather": False, "sequence_parallel": True},
    "mesh": {"group": "mesh", "sequence_parallel": True},
    "symmetric memory": {"symmetric_memory": True},
    "symmetric memory, own tokens": {"symmetric_memory": True, "gather": False, "bias": False},
    "uneven": {"sizes": UNEVEN, "sequence_parallel": True},
    "uneven, own tokens": {"sizes": UNEVEN, "sequence_parallel": True, "gather": False, "bias": False},
    "one token": {"sizes": ONE, "sequence_parallel": True},
    "sizes, symmetric memory": {"sizes": {2: [2, 2], 4: [2] * 4}, "symmetric_memory": True},
}


def settings(given: dict[str, Any], world: int) -> dict[str, Any]:
    return {name: value[world] if name == "sizes" else value for name, value in given.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_against_one_process(pools, world, name):
    for answer in run(pools, world, "layers", **settings(CASES[name], world)):
        assert answer["dtypes"]
        assert max(error["ours"] for error in answer["errors"].values()) <= DISTRIBUTED_FLOAT64, answer["errors"]
        gathered = {"_allgather_base_": 1}
        column = gathered if CASES[name].get("sequence_parallel") else {}
        gathers = int(CASES[name].get("gather", True))
        if CASES[name].get("symmetric_memory"):  # its stand-in fetches what the others wrote
            row = {"_allgather_base_": 1 + gathers}
        else:
            row = {"_reduce_scatter_base_": 1} | (gathered if gathers else {})
        assert answer["collectives"] == [column, row]


@pytest.mark.parametrize("sizes", [None, [1, 4], [0, 1]])
@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_groups_that_are_not_the_world(pools, group, sizes):
    answers = run(pools, 4, "layers", group=group, sizes=sizes, sequence_parallel=True)
    inside = [one for one in answers if one is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    for answer in inside:
        assert max(error["ours"] for error in answer["errors"].values()) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_bfloat16(pools, world, name):
    """As exact as one process, whose layer adds what the ranks round."""
    for answer in run(pools, world, "layers", dtype="bfloat16", **settings(CASES[name], world)):
        assert answer["dtypes"]
        for name, error in answer["errors"].items():
            assert error["ours"] <= limit(error["plain"], "bfloat16"), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("world", "group"), [(2, "default"), (4, "default"), (4, "subset")])
def test_both_paths_give_the_same_bits(pools, world, group, dtype):
    inside = [found for found in run(pools, world, "both_paths", dtype=dtype, group=group) if found is not None]
    assert inside == [[True, True]] * (2 if group == "subset" else world)


@pytest.mark.parametrize("sizes", [[3, 1], [0, 1]])
def test_symmetric_memory_is_not_taken_by_unequally_many_tokens(pools, sizes):
    """Where it could run: path="auto" sends what the collectives do."""
    refused = (
        f"UnsupportedError: {ROW}: path must be usable here, got 'symmetric_memory'. It exchanges equally many tokens of "
        f'every rank, and split_sizes is {sizes}. Pass path="auto".'
    )
    sent = {"_reduce_scatter_base_": 1, "_allgather_base_": 1}
    assert run(pools, 2, "path_of_sizes", sizes=sizes) == [{"auto": sent, "fused": refused}] * 2


def test_symmetric_memory_is_taken_by_equally_many_tokens(pools):
    """Its stand-in fetches what the others wrote."""
    sent = {"_allgather_base_": 2}
    assert run(pools, 2, "path_of_sizes", sizes=[2, 2]) == [{"auto": sent, "fused": "taken"}] * 2


def test_which_path_and_why(pools):
    cpu = "Symmetric memory is a path of CUDA devices, and the tensors are on cpu."
    one = "A group of one rank has nothing to exchange."
    assert run(pools, 2, "paths") == [[["collectives", cpu], ["collectives", one]]] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"is_available": False}, "Symmetric memory is a path of CUDA devices, and PyTorch finds none."),
        (
            {"get_device_capability": (8, 0)},
            "Multicast needs a GPU of the Hopper class or newer, and this is some GPU.",
        ),
        ({"backend_of": "gloo"}, "The group's backend for CUDA tensors is gloo; it has to be nccl."),
        ({"device_count": 1}, "The group has 2 ranks and this host 1 GPUs; they have to share NVLink."),
        ({"get_process_group_ranks": [7, 8]}, "The group's ranks, 7, 8, are on several hosts of 8 ranks."),
    ],
)
def test_why_a_machine_takes_the_collectives(changes, reason, monkeypatch):
    """Of a host with eight GPUs of the Hopper class under NCCL, and of others."""
    answers = {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_name": "some GPU",
        "device_count": 8,
        "backend_of": "nccl",
        "get_process_group_ranks": [2, 3],
    } | changes
    for name, answer in answers.items():
        where = next(each for each in (inference_symmetric, torch.cuda, torch.distributed) if hasattr(each, name))
        monkeypatch.setattr(where, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(inference_symmetric, "_missing", lambda _: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    over = RankGroup("f", object(), rank=0, size=2)
    assert inference_symmetric.why_not(over, torch.device("cuda"), torch.bfloat16) == reason


ROW = "row_parallel_linear_residual_norm"
REFUSED = {
    "path": f"SpecError: {ROW}: path must be one of auto, collectives, symmetric_memory, got 'fast'.",
    "symmetric memory": f"UnsupportedError: {ROW}: path must be usable here, got 'symmetric_memory'. Symmetric memory is a "
    'path of CUDA devices, and the tensors are on cpu. Pass path="auto".',
    "residual": f"SpecError: {ROW}: residual must be [2, 3, 16], this rank's tokens, got [4, 3, 16] (x is [4, 3, 4]).",
    "dtype of residual": f"SpecError: {ROW}: residual must be of x's dtype float32, got float64.",
    "norm_weight": f"SpecError: {ROW}: norm_weight must be [16], got [3].",
    "tokens": f"SpecError: {ROW}: dim 0 of x must be a multiple of the 2 ranks it is split over, got 3 (x is [3, 3, 4]). "
    "Pass split_sizes for parts of other sizes.",
    "sum of sizes": f"SpecError: {ROW}: split_sizes must be of sum 4, the size of dim 0 of x, got [3, 2] of sum 5 (x is ",
    "sizes of three": f"SpecError: {ROW}: split_sizes must be of one size for each of the 2 ranks, got [2, 1, 1].",
    "size below 0": f"SpecError: {ROW}: split_sizes must be >= 0, got [5, -1].",
    "sizes that are none": f"TypeError: {ROW}: split_sizes must be a sequence of integers or None, got int.",
    "residual of sizes": f"SpecError: {ROW}: residual must be [3, 3, 16], this rank's tokens, got [2, 3, 16] (x is [4, 3, ",
    "eps": f"SpecError: {ROW}: eps must be >= 0, got -1.0.",
    "gather": f"TypeError: {ROW}: gather must be True or False, got int.",
    "weight": f"SpecError: {ROW}: weight must be [16, 4], got [16, 3] (x is [4, 3, 4]).",
    "gradient": f"UnsupportedError: {ROW}: weight must be without a gradient, got one that requires grad in grad mode. Call "
    "it under torch.no_grad(); ",
    "column norm_weight": "SpecError: norm_column_parallel_linear: norm_weight must be [8], got [3].",
    "column gradient": "UnsupportedError: norm_column_parallel_linear: norm_weight must be without a gradient, got one ",
    "column sizes": "SpecError: norm_column_parallel_linear: split_sizes must be left out without sequence_parallel, got "
    "[4, 0]. It says how many tokens each rank holds.",
    "column part": "SpecError: norm_column_parallel_linear: split_sizes must be 4 for rank 0, the size of dim 0 of x, got 3 "
    "in [3, 1] (x is [4, 3, 8]).",
    "column sizes of one": "SpecError: norm_column_parallel_linear: split_sizes must be of one size for each of the 2 ranks",
}


def test_a_wrong_call_is_refused_before_anything_is_sent(pools):
    """By the rank that makes it, with no other rank in any call."""
    messages = run(pools, 2, "refused")[0]
    assert messages.pop("collectives") == "0"
    assert set(messages) == set(REFUSED)
    for name, message in messages.items():
        assert message.startswith(REFUSED[name]), name


@pytest.mark.parametrize("name", ["norm_column_parallel_linear", ROW])
def test_signatures(name):
    found = inspect.signature(getattr(parallel, name)).parameters.values()
    agreed = [argument for argument in PARALLEL_SIGNATURES[name] if "torch" in argument.halves]
    assert [(one.name, one.default) for one in found if one.default is not inspect.Parameter.empty] == [
        (argument.name, argument.default)
        for argument in agreed
        if argument.name in ("bias", "eps") or argument.keyword_only
    ]
    assert [one.name for one in found] == [argument.name for argument in agreed]

"""Collectives over gloo ranks against their NumPy specification: values, gradients, counts, and errors that end.

What runs on the ranks is in ranks_collectives.py.
"""

import inspect
from typing import Any

import pytest
import torch

from shared_specs import UnsupportedError
from shared_specs.collectives.cases import collective_cases
from shared_specs.collectives.oracle import COLLECTIVES
from shared_specs.signatures import PARALLEL_SIGNATURES
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.loss.ranks_torch_loss import distance
from tests.ranks import Ranks
from tiled_torch import parallel
from tiled_torch.collectives import failures, transport
from tiled_torch.collectives.groups import RankGroup

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
# Collectives that a call makes forward and backward: all but the two that only keep or cut make one.
SILENT = {
    "copy_to_tensor_parallel_region": [0, 1],
    "reduce_from_tensor_parallel_region": [1, 0],
    "scatter_to_tensor_parallel_region": [0, 1],
    "gather_from_tensor_parallel_region": [1, 0],
    "scatter_to_sequence_parallel_region": [0, 1],
}


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.collectives.ranks_torch_collectives:{function}", **arguments)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("world", WORLDS)
def test_every_case(pools, world, layout):
    """Each with one collective forward and one backward, or none where nothing has to move."""
    for answer in run(pools, world, "cases", layout=layout):
        assert set(answer) == {case.id for case in collective_cases(world)}
        for case in collective_cases(world):
            found = answer[case.id]
            assert max(found["y"], found["dx"]) <= DISTRIBUTED_FLOAT64, case.id
            expected = SILENT.get(case.name, [1, 1])
            if case.arguments.get("tensor_parallel_output_grad") is False:
                expected = [1, 0]
            assert found["collectives"] == expected, case.id


@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_groups_that_are_not_the_world(pools, group):
    """The ranks outside are not waited for, and two groups side by side do not mix."""
    inside = [answer for answer in run(pools, 4, "cases", group=group) if answer is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    for answer in inside:
        assert max(max(found["y"], found["dx"]) for found in answer.values()) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(pools, world, dtype):
    """Every result is the exact one, rounded once."""
    for answer in run(pools, world, "cases", dtype=dtype):
        assert set(answer) == {case.id for case in collective_cases(world)}
        for name, found in answer.items():
            assert found["rounded once"] == [True, True], name
            assert max(found["collectives"]) <= 1, name


def test_float32(pools):
    """Against exact sums of the same rounded inputs; the baseline rounds once per addition."""
    for answer in run(pools, 4, "cases", dtype="float32"):
        for name, found in answer.items():
            assert max(found["y"], found["dx"]) <= limit(2 * 2.0**-24, "float32"), name


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums_of_16_bits_are_taken_in_float32(pools, world, dtype, few):
    """By collectives that do not add, or that add float32; two ranks add once. Each is under way while others compute."""
    exchange, gather = {"alltoall_base_": 1}, {"_allgather_base_": 1}
    if world == 2:
        reduced, scattered = {"allreduce_": 1}, {"_reduce_scatter_base_": 1}
        order = ["mm", "allreduce", "mm", "wait"]
    elif few:
        reduced, scattered = {"allreduce_": 1}, exchange
        order = ["mm", "allreduce", "mm", "wait"]
    else:
        reduced, scattered = exchange | gather, exchange
        order = ["mm", "alltoall_base", "mm", "wait", "allgather_base"]
    for answer in run(pools, world, "sums_of_16_bits", dtype=dtype, few=few):
        assert (answer["reduced"], answer["scattered"]) == (reduced, scattered)
        assert answer["exact"] == [True] * 3
        assert answer["in place"]
        assert answer["untouched"]
        assert answer["order"] == order


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_derivatives(pools, world):
    """Under both forms of checkpointing, from a zero-stride gradient, and a second time."""
    for answer in run(pools, world, "derivatives"):
        assert set(answer) == {case.id for case in collective_cases(world)}
        for name, errors in answer.items():
            assert max(errors.values()) <= DISTRIBUTED_FLOAT64, (name, errors)


def test_a_group_of_one_is_free(pools):
    assert run(pools, 2, "one_rank") == [[[0], []]] * 2


def test_integers(pools):
    assert run(pools, 2, "integers") == [[[0, 1], [0, 1, 2, 3], False], [[2, 3], [0, 1, 2, 3], False]]


@pytest.mark.deep
def test_under_compile(pools):
    assert max(run(pools, 2, "compiled")) <= DISTRIBUTED_FLOAT64


REFUSED = {
    "last dim": "SpecError: scatter_to_tensor_parallel_region: dim 1 of x must be a multiple of the 2 ranks it is split "
    "over, got 3 (x is [5, 3]). Pad it.",
    "last dim summed": "SpecError: reduce_scatter_last_dim_to_tensor_parallel_region: dim 1 of x must be a multiple of ",
    "tokens": "SpecError: scatter_to_sequence_parallel_region: dim 0 of x must be a multiple of the 2 ranks it is split "
    "over, got 5 (x is [5, 3]). Pass split_sizes for parts of other sizes.",
    "tokens summed": "SpecError: reduce_scatter_to_sequence_parallel_region: dim 1 of x must be a multiple of the 2 ",
    "sum of sizes": "SpecError: scatter_to_sequence_parallel_region: split_sizes must be of sum 5, the size of dim 0 of "
    "x, got [3, 3] of sum 6 (x is [5, 3]).",
    "own size": "SpecError: gather_from_sequence_parallel_region: split_sizes must be 5 for rank 0, the size of dim 0 of "
    "x, got 4 in [4, 4] (x is [5, 3]).",
    "count of sizes": "SpecError: scatter_to_sequence_parallel_region: split_sizes must be of one size for each of the 2 "
    "ranks, got [5, 5, 5].",
    "negative size": "SpecError: scatter_to_sequence_parallel_region: split_sizes must be >= 0, got [6, -1].",
    "kind of sizes": "TypeError: scatter_to_sequence_parallel_region: split_sizes must be a sequence of integers or "
    "None, got int.",
    "kind of size": "TypeError: scatter_to_sequence_parallel_region: split_sizes must be a sequence of integers or None, "
    "got one with a float.",
    "dim": "SpecError: gather_from_sequence_parallel_region: dim must be in [-2, 2), got 2 (x is [5, 3]).",
    "kind of dim": "TypeError: gather_from_sequence_parallel_region: dim must be an integer, got float.",
    "flag": "TypeError: gather_from_sequence_parallel_region: tensor_parallel_output_grad must be True or False, got int.",
    "no dims": "SpecError: gather_from_tensor_parallel_region: dim must be left to an x with dims, got -1 (x is []).",
    "rows": "SpecError: all_to_all: dim 0 of x must be a multiple of the 2 ranks it is split over, got 5 (x is [5, 3]). "
    "Pass input_split_sizes and output_split_sizes for parts of other sizes.",
    "one of two": "SpecError: all_to_all: output_split_sizes must be given, or both left out, got None.",
    "sum of rows": "SpecError: all_to_all: input_split_sizes must be of sum 5, the size of dim 0 of x, got [1, 1] of ",
    "rows to itself": "SpecError: all_to_all: output_split_sizes must be 5 for rank 0, which is what it gives itself by "
    "input_split_sizes, got 4 in [4, 0].",
    "hidden": "SpecError: all_to_all_sequence_to_hidden: dim 1 of x must be a multiple of the 2 ranks it is split over, ",
    "sequence": "SpecError: all_to_all_hidden_to_sequence: dim 0 of x must be a multiple of the 2 ranks it is split over",
    "one dim": "SpecError: all_to_all_hidden_to_sequence: x must be of two dims or more, tokens first and features last, "
    "got [4].",
    "x": "TypeError: copy_to_tensor_parallel_region: x must be an array, got list.",
    "group": "TypeError: copy_to_tensor_parallel_region: group must be a process group, a DeviceMesh or None, got int.",
}


def test_a_wrong_call_is_refused_before_anything_is_sent(pools):
    """By the rank that makes it, with no other rank in any call."""
    inside, outside = run(pools, 2, "refused")
    assert (inside.pop("collectives"), outside.pop("collectives")) == ("0", "0")
    assert set(inside) == set(REFUSED)
    for name, message in inside.items():
        assert message.startswith(REFUSED[name]), name
    text = (
        "SpecError: copy_to_tensor_parallel_region: this rank is not in group. Call it only on the ranks of the group."
    )
    assert outside == {"outside": text}


def test_meshes_and_dtensors(pools):
    for mesh, dtensor in run(pools, 2, "meshes"):
        assert mesh == "copy_to_tensor_parallel_region: group must be a mesh of one dim, got one of 2."
        assert dtensor.startswith("reduce_from_tensor_parallel_region: x must be a plain tensor, got a DTensor. ")


def test_the_error_of_a_sum_does_not_grow_with_the_ranks():
    """Partial products of 64 ranks meet the limit of one process; added in bfloat16, as a ring does, they are far off."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(128, 1024, generator=draw).bfloat16() for _ in range(2))
    exact = x.double() @ weight.double().T

    def error(a: torch.Tensor) -> float:
        return distance(a.double(), exact)

    allowed = limit(error((x.float() @ weight.float().T).bfloat16()), "bfloat16")
    pairs = zip(x.float().chunk(64, 1), weight.float().chunk(64, 1), strict=True)
    parts = torch.stack([(a @ b.T).bfloat16() for a, b in pairs])
    assert error(transport.wide_sum(parts)) <= allowed
    ring = parts[0]
    for part in parts[1:]:
        ring = ring + part
    assert error(ring) > allowed


class Broken:
    """A backend whose collectives end as `work` says: at once, or when they are waited for."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def __call__(self, *_: Any, **__: Any) -> "Broken":
        if self.at_once:
            self.wait()
        return self

    def wait(self) -> None:
        raise RuntimeError("Timed out.")


CALLS = {
    "all_reduce": ("all-reduce", (torch.ones(6),)),
    "all_reduce_": ("all-reduce", (torch.ones(6),)),
    "all_gather": ("all-gather", (torch.ones(6), 0)),
    "reduce_scatter": ("reduce-scatter", (torch.ones(6), 0)),
    "all_to_all": ("all-to-all", (torch.ones(6),)),
    "all_reduce of 16 bits": ("all-reduce", (torch.ones(6).half(),)),
    "reduce_scatter of 16 bits": ("reduce-scatter", (torch.ones(6).half(), 0)),
}


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_who_waited_in_vain_says_where(monkeypatch, call, at_once, few):
    """The public call, the collective, the rank in the group and all ranks of the group."""
    name, arguments = CALLS[call]
    for backend in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(torch.distributed, backend, Broken(at_once))
    for backend in ("_gather_equal", "_reduce_scatter_equal"):
        monkeypatch.setattr(transport, backend, Broken(at_once))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [1, 5, 8])
    for comparison in ("same_collective", "same_exchange"):
        monkeypatch.setattr(transport, comparison, lambda *_: None)
    monkeypatch.setattr(transport, "SMALL_ELEMENTS", few)
    expected = (
        f"^the_call: {name} failed on rank 1 of 3. Every rank of the group .ranks 1, 5, 8 of all. has .*Timed out.$"
    )
    with pytest.raises(RuntimeError, match=expected):
        getattr(transport, call.partition(" ")[0])(RankGroup("the_call", object(), 1, 3), *arguments).wait()


def test_a_backend_that_lost_a_rank_is_still_told_as_such():
    def lose() -> None:
        raise torch.distributed.DistBackendError("NCCL communicator was aborted")

    with pytest.raises(
        torch.distributed.DistBackendError, match=r"^f: all-gather failed on rank 0 of 2. .* was aborted$"
    ):
        failures.run_collective(RankGroup("f", None, 0, 2), "all-gather", lose)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_without_a_process_group(name):
    with pytest.raises(UnsupportedError, match=f"^{name}: group must be usable here, got no initialised process group"):
        getattr(parallel, name)(torch.ones(2, 2))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_signatures(name):
    found = inspect.signature(getattr(parallel, name)).parameters.values()
    agreed = [argument for argument in PARALLEL_SIGNATURES[name] if "torch" in argument.halves]
    assert [one.name for one in found] == [argument.name for argument in agreed]
    assert [one.default for one in found][1:] == [argument.default for argument in agreed][1:]

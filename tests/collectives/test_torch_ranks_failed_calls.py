"""Where one rank does not make the call of the others, their errors say so and name it. See ranks_failed_calls.py."""

import json
import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import LOOPBACK, ROOT
from tiled_torch.collectives import failures
from tiled_torch.collectives.groups import RankGroup

pytestmark = pytest.mark.ranks

SCATTER = "reduce_scatter_to_sequence_parallel_region"
GATHER = "gather_from_sequence_parallel_region: all-gather"
NOTHING = "wrote nothing: look there first"


def run(pools: Any, world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.collectives.ranks_torch_failed_calls:{function}", **arguments)


def suspects(message: str) -> set[int]:
    """The ranks of which an error says that nothing is known."""
    found = re.search(r"Ranks? ([\d, ]+)(?: \([\d, ]+ of all\))? wrote nothing", message)
    return {int(rank) for rank in found[1].split(", ")} if found else set()


def test_a_rank_that_makes_no_call(pools):
    """All others say so; nothing was written before a call failed, and what was written ends with the next call."""
    answers = run(pools, 4, "absent", missing=2)
    assert answers[2]["message"] == "no call"
    others = [answers[rank]["message"] for rank in (0, 1, 3)]
    for rank, message in zip((0, 1, 3), others, strict=True):
        assert message.startswith(f"RuntimeError: {SCATTER}: reduce-scatter failed on rank {rank} of 4. Every rank of ")
        assert "waited in the same call." in message
    assert set.intersection(*map(suspects, others)) == {2}
    for answer in answers:
        assert answer["quiet"] == []
        assert answer["written"] == 3
        assert sorted(map(tuple, map(json.loads, answer["last"][-3:]))) == [("rank",)] * 3


@pytest.mark.deep
def test_a_wrong_call_on_one_rank_of_groups_that_are_not_the_world(pools):
    """Ranks are numbered as in the group, and as in the world; who waits for them in turn is told so."""
    first, second, third, fourth = run(pools, 4, "subgroups")
    start = f"RuntimeError: {SCATTER}: reduce-scatter failed on rank 0 of 2. Every rank of the group "
    assert first.startswith(f"{start}(ranks 0, 2 of all) has to make this call")
    assert f"Rank 1 (2 of all) waited in another call of another group, {GATHER} of float32 [3]." in first
    assert second.startswith(f"{start}(ranks 1, 3 of all) has to make this call")
    assert f"Rank 1 (3 of all) {NOTHING}" in second
    assert third.startswith(f"RuntimeError: {GATHER} failed on rank 0 of 2.")
    assert f"Rank 1 (3 of all) {NOTHING}" in third
    assert fourth.startswith(f"SpecError: {SCATTER}: dim 0 of x must be a multiple of the 2 ranks")


def test_a_rank_that_makes_another_call(pools):
    first, second = run(pools, 2, "functions", under="nccl")
    assert f"Rank 1 waited in another call, {GATHER} of float32 [3]." in first
    assert f"Rank 0 waited in another call, {SCATTER}: reduce-scatter of float32 [2, 2]." in second


def test_calls_that_were_alike_before_and_no_longer_are(pools):
    """Nobody compares them any more; the error of the collective that then fails shows in what they differ."""
    (first,), (second,) = run(pools, 2, "known_calls", under="nccl")
    assert "Rank 1 waited in another call, tensor_parallel_mlp: all-reduce of float64 [8, 5], with " in first
    assert "sequence_parallel False (here True)" in first
    assert "sequence_parallel True (here False)" in second


def test_under_gloo_they_are_compared_again(pools):
    """Each rank is told at once, whatever was alike before."""
    rule = f"the function must be the same on all 2 ranks, got {SCATTER}, {GATHER.partition(':')[0]}."
    first, second = run(pools, 2, "functions", under="gloo")
    assert (first, second) == (f"SpecError: {SCATTER}: {rule}", f"SpecError: {GATHER.partition(':')[0]}: {rule}")
    expected = "SpecError: tensor_parallel_mlp: sequence_parallel must be the same on all 2 ranks, got True, False."
    shards = "SpecError: tensor_parallel_mlp: shard_tokens must be the same on all 2 ranks, got 8, 4."
    assert run(pools, 2, "known_calls", under="gloo") == [[expected, shards]] * 2


@pytest.mark.deep
def test_processes_that_ended():
    """By an error of their own, which the others are told, or killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.collectives.ranks_torch_failed_calls"]
    options: Any = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1", **LOOPBACK}, "text": True}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen([*command, str(rank), str(store.port)], **options, **pipes) for rank in range(3)]
    (told, errors), (_, own), _ = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 1, -9], errors
    assert "KeyError: 'no such sample'" in own
    assert told.startswith(f"RuntimeError: {GATHER} failed on rank 0 of 3.")
    assert "Rank 1 ended with KeyError: 'no such sample'." in told
    assert f"Rank 2 {NOTHING}" in told


class Silent:
    """A store whose machine no longer answers."""

    def append(self, key: str, value: str) -> None:
        threading.Event().wait(60)


class Gone:
    """A store whose process has ended."""

    def append(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("store", [Silent(), Gone()])
def test_without_an_answer_of_the_store(monkeypatch, store):
    """The error is told without what the others do, and not kept from the caller."""
    monkeypatch.setattr(failures, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(failures, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert failures.others_in(RankGroup("f", _Group(), 0, 2), "all-gather", None) == ""


class _Group:
    group_name = "1"

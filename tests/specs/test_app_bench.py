"""What the GPU benchmarks of both halves measure, and in which order."""

import pytest

from shared_specs.app.bench import Deadline, interleave, mlp_workloads


def test_shards_are_swept_where_they_are_several():
    """At 8192 tokens shards of 8192 and 16384 would be the same one; a shard longer than its tokens is left out."""
    shards = (2048, 4096, 8192, 16384)
    sweep = [(32768, shard) for shard in shards]
    assert mlp_workloads((8192, 32768, 131072), shards) == [(131072, 8192), *sweep, (8192, 8192)]
    assert mlp_workloads((4096, 8192, 16384), shards) == [(16384, 8192), *((8192, t) for t in shards[:3]), (4096, 8192)]


@pytest.mark.parametrize(("minutes", "over"), [(1e-9, True), (1.0, False)])
def test_deadline(minutes, over, capsys):
    assert Deadline(minutes).leaves_out("8b: 1 x 2 x 3") == over
    said = "8b: 1 x 2 x 3: left out: the 1e-09 minutes of --minutes are over\n"
    assert capsys.readouterr().out == (said if over else "")


@pytest.mark.parametrize("warm", [False, True])
def test_every_variant_runs_once_in_every_turn(warm):
    ran = []
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    seconds = interleave(runs, 2, warm=warm)
    assert ran[0 if warm else 3 :] == [*"abc", *"bca"]
    assert [len(times) for times in seconds.values()] == [2, 2, 2]

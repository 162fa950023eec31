"""How the benchmarks of both halves take turns."""

from shared_specs.app.bench.bench import interleave


def test_every_variant_runs_once_in_every_turn():
    ran = []
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    seconds = interleave(runs, 2)
    assert ran[3:] == [*"abc", *"bca"]
    assert [len(times) for times in seconds.values()] == [2, 2, 2]

"""How the benchmarks of both halves take turns, and what they refuse."""

import numpy as np
import pytest

from shared_specs.app.bench.bench import TILED, check_results, interleave, measure_times, predicted_bytes
from shared_specs.app.bench.workloads import MLP_WORKLOADS
from shared_specs.mlp.costs import plan_mlp, saved_bytes


def test_every_variant_runs_once_in_every_turn():
    ran = []
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    seconds = interleave(runs, 2)
    assert ran[3:] == [*"abc", *"bca"]
    assert [len(times) for times in seconds.values()] == [2, 2, 2]


PLAIN = {"y": np.ones(4, np.float32), "dx": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize("wrong", [None, np.full(4, np.nan, np.float32), np.arange(4) * np.float32(1.01)])
def test_a_variant_that_has_another_gradient_or_none_is_refused(wrong):
    same = {name: array + np.float32(1e-7) for name, array in PLAIN.items()}
    check_results([("plain", PLAIN), ("same", same)])
    with pytest.raises(RuntimeError, match=r"^bench: other does not compute the plain dx$"):
        check_results([("plain", PLAIN), ("same", same), ("other", PLAIN | {"dx": wrong})])


def test_a_plain_variant_without_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match=r"^bench: plain does not compute the plain dx$"):
        check_results([("plain", PLAIN | {"dx": None})])


def test_times_come_with_what_else_is_known():
    runs = {"plain": lambda: None, "tiled": lambda: None}
    rows = measure_times(MLP_WORKLOADS[0], 8, runs, 3, {"tiled": {"peak_bytes": 5}})
    shared = {"workload": MLP_WORKLOADS[0].name, "shards": 8, "repeats": 3}
    assert [row["variant"] for row in rows] == ["plain", "tiled"]
    assert all(row.items() >= shared.items() and row["median_seconds"] > 0 for row in rows)
    assert [row.get("peak_bytes") for row in rows] == [None, 5]


def test_predicted_bytes_are_those_of_the_half_and_what_is_kept():
    shape = MLP_WORKLOADS[0].shape
    plan = plan_mlp("test", shape)
    found = predicted_bytes(shape, plan, lambda shape, plan: 7)
    assert found == {name: 7 + saved_bytes(shape, plan, keep=keep) for name, keep in TILED.items()}
    assert found["tiled-keep-1"] > found["tiled"] == 7

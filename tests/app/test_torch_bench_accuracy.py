"""`bench --op accuracy`: every variant and peer is measured, and errors that are wrong are seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared_specs.app.bench.accuracy import WEIGHTS
from shared_specs.app.bench.workloads import ACCURACY_WORKLOADS
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.tolerances import BF16_256_SHARDS
from tiled_torch.commands.bench import accuracy
from tiled_torch.commands.bench.bench import bench
from tiled_torch.commands.bench.peers import PlainMLP, results_of

SMALL = replace(ACCURACY_WORKLOADS[0], name="small", tokens=4096, hidden=32, intermediate=48)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in accuracy.measure(SMALL)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the peers
def test_every_variant_is_measured(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows)[:2] == ["plain", "tiled"]
    assert set(rows) == {"plain", "tiled", "liger", "deepspeed"}
    for row in rows.values():
        assert (row["workload"], row["shards"]) == ("small", 256)
        assert "left_out" in row or set(row["errors"]) == {"y", "dx", *WEIGHTS}
    assert rows["plain"]["ratio_to_plain"] == 1
    assert rows["tiled"]["ratio_to_plain"] <= BF16_256_SHARDS


@pytest.mark.parametrize("peer", ["liger", "deepspeed"])
def test_peers_that_sum_in_bfloat16_drift(rows: dict[str, dict[str, Any]], peer: str) -> None:
    if "left_out" in rows[peer]:
        pytest.skip(f"{peer} does not run here: {rows[peer]['left_out']}")
    assert rows[peer]["ratio_to_plain"] > 2 * BF16_256_SHARDS


def test_sums_in_bfloat16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards one after the other through automatic differentiation, which adds their gradients in bfloat16."""

    def drifting(mlp: PlainMLP, shards: int) -> dict[str, Any]:
        return {"plain": mlp, "tiled": lambda x: torch.cat([mlp(part) for part in x.chunk(shards, 1)], 1)}

    monkeypatch.setattr(accuracy, "own_variants", drifting)
    monkeypatch.setattr(accuracy, "peer_variants", lambda mlp, shards: ({}, {"liger": "No module."}))
    tiled, liger = accuracy.measure(SMALL)[1:]
    assert tiled["ratio_to_plain"] > 2 * BF16_256_SHARDS
    assert liger == {"variant": "liger", "workload": "small", "shards": 256, "left_out": "No module."}


def test_a_tiled_y_that_is_wrong_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "own_variants", lambda mlp, _: {"plain": mlp, "tiled": lambda x: 1.1 * mlp(x)})
    monkeypatch.setattr(accuracy, "peer_variants", lambda mlp, shards: ({}, {}))
    with pytest.raises(RuntimeError, match=r"^bench: tiled does not compute y$"):
        accuracy.measure(SMALL)


def test_gradients_do_not_pile_up() -> None:
    """Each variant begins with none, whatever ran before it."""
    mlp, x = PlainMLP(4, 6, torch.float32), torch.randn(1, 8, 4, requires_grad=True)
    first, again = (results_of(mlp, mlp, x, torch.ones(1, 8, 4)) for _ in range(2))
    assert first.keys() == {"y", "dx", *WEIGHTS}
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert [first[name].shape for name in ("y", *WEIGHTS)] == [(8, 4), (4, 6), (4, 6), (6, 4)]


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_specs.app.bench.bench.require_parity", lambda half, op: f"{half} passed")
    monkeypatch.setattr(
        accuracy, "measure", lambda workload, repeats: [{"variant": "plain", "workload": workload.name}]
    )
    options = BenchOptions(op="accuracy", out=str(tmp_path))
    options.check()
    assert bench(options) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert path.name.startswith("accuracy_tiled_torch_")
    assert (record["kind"], record["half"], record["parity"]) == ("accuracy", "tiled_torch", "torch passed")
    assert record["results"] == [{"variant": "plain", "workload": ACCURACY_WORKLOADS[0].name}]


def test_a_benchmark_of_the_other_half_is_refused(tmp_path: Path) -> None:
    options = BenchOptions(op="mesh", out=str(tmp_path))
    options.check()
    with pytest.raises(InputError, match="--op mesh is of tiled_jax alone"):
        bench(options)

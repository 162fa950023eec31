"""`bench --op mesh` in JAX: every variant is measured, and a gather of tokens would be seen in its row."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from shared_specs.app.bench.workloads import MESH_WORKLOADS
from shared_specs.app.options import BenchOptions, InputError
from tiled_jax.commands.bench import mesh
from tiled_jax.commands.bench.bench import bench

pytestmark = pytest.mark.ranks
REPLICATED, SHARDED = (
    replace(workload, sequences=8, tokens=8, hidden=8, intermediate=16, shards=2) for workload in MESH_WORKLOADS
)


def test_no_variant_gathers_tokens() -> None:
    rows = {row["variant"]: row for row in mesh.measure(REPLICATED, 1)}
    assert list(rows) == ["plain", "tiled", "tiled-token-axes", "tiled-in-shard-map"]
    for row in rows.values():
        assert set(row["collectives"]) == {"all-reduce"}
    assert rows["tiled"]["ratio_to_plain"] > 0


def test_sharded_weights_are_gathered_as_often_as_by_the_plain_layer() -> None:
    rows = {row["variant"]: row["collectives"] for row in mesh.measure(SHARDED, 1)}
    assert list(rows) == ["plain", "tiled", "tiled-token-axes"]
    assert 0 < rows["tiled"]["all-gather"] <= rows["plain"]["all-gather"]


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_specs.app.bench.bench.require_parity", lambda half, op: f"{half} passed")
    monkeypatch.setattr(mesh, "measure", lambda workload, repeats: [{"variant": "x", "workload": workload.name}])
    options = BenchOptions(op="mesh", out=str(tmp_path))
    options.check()
    assert bench(options) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert (record["kind"], record["half"], record["parity"]) == ("mesh", "tiled_jax", "jax passed")
    assert [result["workload"] for result in record["results"]] == [workload.name for workload in MESH_WORKLOADS]


def test_too_few_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    options = BenchOptions(op="mesh", out=str(tmp_path))
    with pytest.raises(InputError, match=r"needs 8 devices, got 1\. On a CPU: XLA_FLAGS=--xla_force"):
        bench(options)
    assert not list(tmp_path.iterdir())

"""`bench --op accuracy` in JAX: every variant is measured, and errors that are wrong are seen."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from shared_specs.app.bench.accuracy import WEIGHTS
from shared_specs.app.bench.workloads import ACCURACY_WORKLOADS, AccuracyWorkload
from shared_specs.app.options import BenchOptions
from shared_specs.tolerances import BF16_256_SHARDS
from tiled_jax.commands.bench import accuracy
from tiled_jax.commands.bench.bench import bench
from tiled_jax.commands.bench.peers import MLP, plain

SMALL = replace(ACCURACY_WORKLOADS[0], name="small", tokens=4096, hidden=32, intermediate=48)


def test_every_variant_is_measured() -> None:
    rows = {row["variant"]: row for row in accuracy.measure(SMALL)}
    assert list(rows) == ["plain", "scan-checkpoint", "tiled"]
    for row in rows.values():
        assert (row["workload"], row["shards"]) == ("small", 256)
        assert set(row["errors"]) == {"y", "dx", *WEIGHTS}
    assert rows["plain"]["ratio_to_plain"] == 1
    assert rows["tiled"]["ratio_to_plain"] <= BF16_256_SHARDS
    assert rows["scan-checkpoint"]["ratio_to_plain"] > 2 * BF16_256_SHARDS  # the transpose of a scan adds in bfloat16


@pytest.mark.parametrize("quantity", ["y", "dx"])
def test_a_tiled_variant_that_is_wrong_stops_the_benchmark(quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: jax.Array, *weights: jax.Array) -> jax.Array:
        y = plain(x, *weights)
        return 1.1 * y if quantity == "y" else y + 0.1 * (x - jax.lax.stop_gradient(x))

    def variants(workload: AccuracyWorkload) -> dict[str, MLP]:
        return {"plain": plain, "tiled": wrong}

    monkeypatch.setattr(accuracy, "variants", variants)
    with pytest.raises(RuntimeError, match=f"^bench: tiled does not compute {quantity}$"):
        accuracy.measure(SMALL)


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
    assert path.name.startswith("accuracy_tiled_jax_")
    assert (record["kind"], record["half"], record["parity"]) == ("accuracy", "tiled_jax", "jax passed")
    assert record["results"] == [{"variant": "plain", "workload": ACCURACY_WORKLOADS[0].name}]

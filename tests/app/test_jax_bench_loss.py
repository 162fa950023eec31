"""`bench --op loss`: its variants compute the same thing, and one that does not stops it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from shared_specs.app.bench.workloads import LOSS_WORKLOADS
from tiled_jax.commands.bench import loss

SMALL = replace(LOSS_WORKLOADS[0], name="small", tokens=2048, hidden=16, vocab=96)


@pytest.mark.parametrize("ignored", [0.0, 0.9])
def test_every_variant_computes_the_plain_loss_and_is_reported(ignored: float) -> None:
    rows = loss.measure(replace(SMALL, ignored=ignored), repeats=1)
    assert [row["variant"] for row in rows] == ["plain", "scan-checkpoint", "tiled"]
    assert {(row["workload"], row["shards"]) for row in rows} == {("small", 2)}
    assert all(row["temp_bytes"] > 0 and math.isfinite(row["median_seconds"]) for row in rows)


@pytest.mark.parametrize("quantity", ["loss", "dx"])
def test_a_variant_that_computes_something_else_stops_the_benchmark(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loss.variants(1024)["plain"]
    wrong: dict[str, Any] = {
        "loss": lambda x, weight, targets: plain(x, weight, targets) + 1e-3,
        "dx": lambda x, weight, targets: plain(loss.lax.stop_gradient(x), weight, targets),
    }
    monkeypatch.setattr(loss, "variants", lambda shard_tokens: {"plain": plain, "wrong": wrong[quantity]})
    with pytest.raises(RuntimeError, match=f"^bench: wrong does not compute the plain {quantity}$"):
        loss.measure(SMALL, repeats=1)

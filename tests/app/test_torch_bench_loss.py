"""`bench --op loss`: its variants compute the same thing, and one that does not stops it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from shared_specs.app.bench.workloads import LOSS_WORKLOADS
from tiled_torch.commands.bench import loss

SMALL = replace(LOSS_WORKLOADS[0], name="small", tokens=2048, hidden=16, vocab=96)


@pytest.mark.parametrize("ignored", [0.0, 0.9])
def test_every_variant_computes_the_plain_loss_and_is_reported(ignored: float) -> None:
    rows = loss.measure(replace(SMALL, ignored=ignored), repeats=1)
    assert [row["variant"] for row in rows][:4] == ["plain", "checkpoint", "chosen-rows-checkpoint", "tiled"]
    assert {(row["workload"], row["shards"]) for row in rows} == {("small", 2)}
    assert all(math.isfinite(row["median_seconds"]) for row in rows)


@pytest.mark.parametrize("quantity", ["loss", "dx", "dweight"])
def test_a_variant_that_computes_something_else_stops_the_benchmark(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: dict[str, Any] = {
        "loss": lambda x, weight, targets: loss.plain(x, weight, targets) + 1e-3,
        "dx": lambda x, weight, targets: loss.plain(x.detach(), weight, targets),
        "dweight": lambda x, weight, targets: loss.plain(x, weight, targets) + 1e-2 * (weight - weight.detach()).sum(),
    }
    monkeypatch.setattr(loss, "variants", lambda: {"plain": loss.plain, "wrong": wrong[quantity]})
    with pytest.raises(RuntimeError, match=f"^bench: wrong does not compute the plain {quantity}$"):
        loss.measure(SMALL, repeats=1)

"""`bench --op mlp` in JAX: its variants compute the same thing, and one that does not stops it."""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from shared_specs.app.bench.bench import TILED, predicted_bytes
from shared_specs.app.bench.workloads import MLP_WORKLOADS
from shared_specs.mlp import costs as mlp_costs
from tests.core.jax_counting import temp_bytes
from tiled_jax.commands.bench import mlp as bench_mlp
from tiled_jax.commands.bench.peers import y_and_gradients

SMALL = replace(MLP_WORKLOADS[0], name="small", tokens=2048, hidden=16, intermediate=24)


def test_every_variant_computes_the_plain_gradients_and_is_reported() -> None:
    rows = bench_mlp.measure(SMALL, repeats=1)
    assert [row["variant"] for row in rows] == list(bench_mlp.variants(1024))
    assert {(row["workload"], row["shards"], row["repeats"]) for row in rows} == {("small", 2, 1)}
    assert all(row["temp_bytes"] > 0 and math.isfinite(row["median_seconds"]) for row in rows)
    predicted = {row["variant"]: row["predicted_bytes"] for row in rows if "predicted_bytes" in row}
    assert predicted.keys() == {"tiled", "tiled-keep-0.5", "tiled-keep-1"}
    kept = 2 * SMALL.tokens * SMALL.intermediate * 4
    assert predicted["tiled-keep-1"] - predicted["tiled"] == kept


@pytest.mark.parametrize("name", list(TILED))
def test_the_tiled_variants_keep_to_the_prediction(name: str) -> None:
    """Four shards: a compiler that drops optimization barriers has no part in it."""
    T, H, I = 4096, 64, 256  # noqa: E741
    shape = mlp_costs.MLPShape(tokens=T, hidden=H, intermediate=I)
    predicted = predicted_bytes(shape, mlp_costs.plan_mlp("test", shape), mlp_costs.compiled_peak_bytes)[name]
    arguments = (jax.ShapeDtypeStruct(size, "float32") for size in ((T, H), (H, I), (H, I), (I, H), (T, H)))
    used = temp_bytes(y_and_gradients(bench_mlp.variants(1024)[name]), *arguments)
    assert predicted / 2 < used <= predicted


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_a_variant_that_computes_something_else_stops_the_benchmark(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Callable[..., jax.Array] = bench_mlp.variants(1024)["plain"]

    def other(*operands: jax.Array) -> jax.Array:
        return plain(*operands) + 1e-2 * (operands[wrong] - jax.lax.stop_gradient(operands[wrong])).sum()

    monkeypatch.setattr(bench_mlp, "variants", lambda shard_tokens: {"plain": plain, "wrong": other})
    quantity = ("dx", "dw_gate", "dw_up", "dw_down")[wrong]
    with pytest.raises(RuntimeError, match=f"^bench: wrong does not compute the plain {quantity}$"):
        bench_mlp.measure(SMALL, repeats=1)

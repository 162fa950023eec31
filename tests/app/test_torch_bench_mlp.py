"""`bench --op mlp`: its variants compute the same thing, one that does not stops it, and the products alone are as many."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from shared_specs.app.bench.bench import predicted_bytes
from shared_specs.app.bench.workloads import MLP_WORKLOADS
from shared_specs.mlp import costs as mlp_costs
from shared_specs.tolerances import COST_BYTES
from tests.core.torch_counting import GemmFlop, LiveBytes
from tiled_torch.commands.bench import mlp as bench_mlp
from tiled_torch.commands.bench.peers import PlainMLP, own_variants, products_alone

SMALL = replace(MLP_WORKLOADS[0], name="small", tokens=2048, hidden=16, intermediate=24)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the peers
def test_every_variant_computes_the_plain_gradients_and_is_reported() -> None:
    rows = bench_mlp.measure(SMALL, repeats=1)
    own = [*own_variants(PlainMLP(1, 1, torch.float32)), "products-18", "products-20", "products-22"]
    assert [row["variant"] for row in rows if row["variant"] not in ("liger", "deepspeed")] == own
    assert {(row["workload"], row["shards"], row["repeats"]) for row in rows} == {("small", 2, 1)}
    assert all(math.isfinite(row["median_seconds"]) for row in rows)
    counted = {row["variant"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    assert set(counted) == {row["variant"] for row in rows if not row["variant"].startswith("products")}
    predicted = {row["variant"]: row["predicted_bytes"] for row in rows if "predicted_bytes" in row}
    assert predicted.keys() == {"tiled", "tiled-keep-0.5", "tiled-keep-1"}
    assert {name: counted[name] for name in predicted} == pytest.approx(predicted, rel=COST_BYTES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_bytes_are_those_above_inputs_outputs_and_gradients(dtype: str) -> None:
    """Of the plain MLP gate, up, act(gate), h and two gradients of them at once; of the tiled one what the formula says."""
    T, H, I = 2048, 32, 128  # noqa: E741
    mlp = PlainMLP(H, I, getattr(torch, dtype))
    x = torch.randn(1, T, H, dtype=mlp.up_proj.weight.dtype, requires_grad=True)
    itemsize, dy = x.dtype.itemsize, torch.randn(1, T, H, dtype=x.dtype)
    peaks = {
        name: bench_mlp.peak_bytes(bench_mlp._step(forward, mlp, x, dy), mlp, x)
        for name, forward in own_variants(mlp).items()
    }
    assert 6 * T * I * itemsize <= peaks["plain"] <= 7 * T * I * itemsize
    shape = mlp_costs.MLPShape(tokens=T, hidden=H, intermediate=I, itemsize=itemsize, weight_itemsize=itemsize)
    predicted = predicted_bytes(shape, mlp_costs.plan_mlp("test", shape), mlp_costs.peak_bytes)
    assert {name: peaks[name] for name in predicted} == pytest.approx(predicted, rel=COST_BYTES)


def test_the_meter_leaves_out_results_whenever_they_come() -> None:
    with LiveBytes() as counted:
        first = torch.ones(100)
        large = torch.ones(1000)
        last = large + 1
        del large
        view, later = last[:10], torch.ones(500)
    assert counted.peak == 4 * 2100
    assert counted.peak_above([]) == counted.peak
    assert counted.peak_above([view]) == 4 * 1100
    assert counted.peak_above([first, view]) == 4 * 1000
    assert counted.peak_above([first, view, later, torch.ones(7)]) == 4 * 1000
    assert counted.now == 4 * 1600


def test_a_variant_that_computes_another_y_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_mlp, "own_variants", lambda mlp: {"plain": mlp, "wrong": lambda x: mlp(x) + 1e-2})
    monkeypatch.setattr(bench_mlp, "peer_variants", lambda mlp, shards: ({}, {}))
    with pytest.raises(RuntimeError, match=r"^bench: wrong does not compute the plain y$"):
        bench_mlp.measure(SMALL, repeats=1)


@pytest.mark.parametrize(
    ("name", "quantity"),
    [("x", "dx"), ("gate_proj.weight", "dw_gate"), ("up_proj.weight", "dw_up"), ("down_proj.weight", "dw_down")],
)
def test_a_variant_that_computes_something_else_stops_the_benchmark(
    name: str, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def variants(mlp: PlainMLP) -> dict[str, nn.Module]:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            leaf = x if name == "x" else mlp.get_parameter(name)
            return mlp(x) + 1e-2 * (leaf - leaf.detach()).sum()

        return {"plain": mlp, "wrong": wrong}

    monkeypatch.setattr(bench_mlp, "own_variants", variants)
    monkeypatch.setattr(bench_mlp, "peer_variants", lambda mlp, shards: ({}, {}))
    with pytest.raises(RuntimeError, match=f"^bench: wrong does not compute the plain {quantity}$"):
        bench_mlp.measure(SMALL, repeats=1)


@pytest.mark.parametrize(
    ("tokens", "shard_tokens", "recomputed", "units"),
    [(10, 4, 0.0, 18), (10, 4, 1.0, 22), (10, 16, 0.0, 18), (10, 16, 1.0, 22), (16, 4, 0.5, 20)],
)
def test_products_alone(tokens: int, shard_tokens: int, recomputed: float, units: int) -> None:
    """As many as the plain MLP's, or as those of one that recomputes gate and up; shards may be uneven."""
    mlp, x, dy = PlainMLP(6, 12, torch.float32), torch.randn(tokens, 6), torch.randn(tokens, 6)
    run = products_alone(mlp, x, dy, shard_tokens, recomputed=recomputed)
    with GemmFlop() as counted:
        run()
    assert counted.flop == units * tokens * 6 * 12

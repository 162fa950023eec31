"""`bench --device gpu` at tiny sizes on a CPU: what a GPU session will run must run; the kernels say why they cannot."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from shared_specs.blocks import CANDIDATES, Blocks
from shared_specs.cli import BenchOptions, InputError, TuneOptions
from tiled_jax.commands.bench import bench
from tiled_jax.commands.bench_gpu import run_part
from tiled_jax.commands.tune import launches, tune, tune_with

EXPECTED = {
    "kernels": {"xla"},
    "mlp": {"plain", "checkpoint", "tiled-xla", "tiled-in-checkpoint", "plain-forward", "tiled-xla-forward"},
    "loss": {"plain", "tiled-xla-8", "tiled-xla-16"},
}


@pytest.mark.parametrize(
    "op", [pytest.param("kernels", marks=pytest.mark.slow), pytest.param("mlp", marks=pytest.mark.slow), "loss"]
)
def test_every_part_writes_records(op: str, tmp_path: Path) -> None:
    options = BenchOptions(op=op, device="gpu", repeats=1, out=str(tmp_path))
    sizes = {"widths": {"tiny": (16, 32)}, "tokens": (40, 48), "shards": (8, 16, 32), "vocab": 50}
    assert run_part(options, jnp.float32, **sizes) == 0
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    lines = [line for record in records for line in record["results"]]
    assert {line["variant"] for line in lines if "median_seconds" in line} >= EXPECTED[op]
    reasons = {line["variant"]: line["left_out"] for line in lines if "left_out" in line}
    assert all("pallas" in name or name in {"tiled-deterministic", "tokamax"} for name in reasons)
    if op == "kernels":
        questions = {line["question"] for line in lines if line["variant"] == "xla"}
        assert questions == {"up", "down", "linear", "dx", "weight_gradient"}
    if op == "mlp":
        assert "A Pallas kernel needs a Hopper GPU" in reasons["tiled-pallas"]


def test_tune_writes_the_fastest_candidate(tmp_path: Path) -> None:
    table, tried = tmp_path / "blocks.json", []
    table.write_text("[]")

    def run(blocks: Blocks) -> None:
        tried.append(blocks)
        if blocks.stages == 4:
            raise RuntimeError("more shared memory than there is")

    options = TuneOptions(repeats=1)
    assert tune_with(options, {"dgated": ((14336, 4096), run)}, table) == 0
    (entry,) = json.loads(table.read_text())
    assert (entry["kernels"], entry["op"], entry["shape"]) == ("pallas", "dgated", [14336, 4096])
    assert entry["blocks"]["stages"] == 3
    assert set(tried) == set(CANDIDATES["pallas"]["dgated"])
    small = TuneOptions(hidden=128, intermediate=128, vocab=128, tokens=16)
    assert set(launches(small)) == set(CANDIDATES["pallas"])  # one launch for every op of the table


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(InputError, match=r"^tune: a GPU must be there that the kernels run on\. A Pallas kernel needs"):
        tune(TuneOptions())
    with pytest.raises(InputError, match="--device gpu needs a GPU that JAX sees, and there is none"):
        bench(BenchOptions(op="kernels", device="gpu"))

"""`bench --device gpu` at tiny sizes on a CPU: what a GPU session will run must run; the kernels say why they cannot."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.app.bench import measured
from shared_specs.blocks import CANDIDATES, Blocks
from shared_specs.cli import BenchOptions, InputError, TuneOptions
from shared_specs.rounding import relative_error
from shared_specs.tolerances import FLOOR
from tests.asserting import assert_within
from tests.on_jax.counting import temp_bytes
from tests.on_jax.interpreted import clean_interpreter
from tiled_jax.commands import tune as tuning
from tiled_jax.commands.bench import bench
from tiled_jax.commands.bench_gpu import (
    Program,
    WallClock,
    draw,
    logits_runs,
    loss_runs,
    mlp_runs,
    predicted_bytes,
    predicted_loss_bytes,
    run_part,
)
from tiled_jax.commands.tune import launches, tune, tune_with, ways
from tiled_jax.kernels.common import interpreter

EXPECTED = {
    "kernels": {"xla"},
    "mlp": {"plain", "checkpoint", "tiled-xla", "tiled-in-checkpoint", "plain-forward", "tiled-xla-forward"},
    "loss": {"plain", "tiled-xla-8", "tiled-xla-16"},
}
SMALL = TuneOptions(hidden=128, intermediate=128, vocab=128, tokens=16, repeats=2)


@pytest.mark.parametrize(
    "op", [pytest.param("kernels", marks=pytest.mark.slow), pytest.param("mlp", marks=pytest.mark.slow), "loss"]
)
def test_every_part_writes_records(op: str, tmp_path: Path) -> None:
    options = BenchOptions(op=op, device="gpu", repeats=1, minutes=60, out=str(tmp_path))
    sizes = {"widths": {"tiny": (16, 32)}, "tokens": (40, 48, 56), "shards": (8, 16, 32), "vocab": 50}
    assert run_part(options, jnp.float32, **sizes) == 0
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    lines = [line for record in records for line in record["results"]]
    ran = [line for line in lines if "median_seconds" in line]
    assert {line["variant"] for line in ran} >= EXPECTED[op]
    assert all(isinstance(line["temp_bytes"], int) for line in ran)
    reasons = {line["variant"]: line["left_out"] for line in lines if "left_out" in line}
    assert all("pallas" in name or name in {"tiled-deterministic", "tokamax"} for name in reasons)
    if op == "kernels":
        questions = {line["question"] for line in lines if line["variant"] == "xla"}
        products = {"up", "down", "linear", "dx", "weight_gradient"}
        assert questions == products | {"glu", "glu_backward", "cross_entropy"}
        assert {line["question"] for line in ran if line["tflops"] is not None} == products
    if op == "loss":
        assert all((line["predicted_bytes"] is not None) == (line["variant"] != "plain") for line in ran)
    if op == "mlp":
        found = [(record["shape"]["tokens"], record["shard_tokens"]) for record in records]
        assert sorted(found) == [(40, 16), (48, 8), (48, 16), (48, 32), (56, 16)]
        assert {line["variant"] for line in ran if line["predicted_bytes"]} == {"tiled-xla", "tiled-in-checkpoint"}
        assert "A Pallas kernel needs a Hopper GPU" in reasons["tiled-pallas"]


def test_the_deadline_leaves_workloads_out(tmp_path: Path) -> None:
    options = BenchOptions(op="loss", device="gpu", repeats=1, minutes=1e-9, out=str(tmp_path))
    assert run_part(options, jnp.float32, widths={"tiny": (16, 32)}, tokens=(40, 48), shards=(8, 16, 32), vocab=50) == 0
    assert not [*tmp_path.iterdir()]


def test_a_failure_compiles_nothing_again() -> None:
    """A variant that is refused is a line; the others are compiled once each, when they run first."""
    traced = []

    def doubled(x: jax.Array) -> jax.Array:
        traced.append(1)
        return 2 * x

    def refusing(x: jax.Array) -> jax.Array:
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory")

    x = jnp.ones(4)
    runs = {"good": Program(doubled, x), "bad": Program(refusing, x), "last": Program(jnp.sin, x)}
    assert not traced
    lines = measured(runs, 3, WallClock(), {})
    assert [line["variant"] for line in lines] == ["good", "last", "bad"]
    assert lines[-1]["left_out"].startswith("MemoryError: RESOURCE_EXHAUSTED")
    assert len(traced) == 1


def test_the_bytes_of_a_program() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ jnp.cos(x).T

    x = jnp.ones((64, 32))
    run = Program(fn, x)
    assert run.temp_bytes is None
    run()
    assert run.temp_bytes == temp_bytes(fn, x) > 0


def test_the_tiled_variants_keep_to_the_prediction() -> None:
    runs, _ = mlp_runs(1024, 64, 128, 256, jnp.float32)
    predicted = predicted_bytes(1024, 64, 128, 256, jnp.float32)
    assert predicted.keys() == {name for name in runs if name.startswith("tiled") and not name.endswith("forward")}
    for name in ("plain", "tiled-xla"):
        runs[name]()
    found, plain = runs["tiled-xla"].temp_bytes, runs["plain"].temp_bytes
    assert predicted["tiled-xla"] / 2 < found <= predicted["tiled-xla"] < plain


def test_the_tiled_losses_keep_to_the_prediction() -> None:
    runs, _ = loss_runs(512, 64, 1000, (64, 128), jnp.float32)
    predicted = predicted_loss_bytes(512, 64, 1000, (64, 128), jnp.float32)
    assert predicted.keys() == runs.keys() - {"plain"}
    for name in ("plain", "tiled-xla-64", "tiled-xla-128"):
        runs[name]()
        if name != "plain":
            assert predicted[name] / 2 < runs[name].temp_bytes <= predicted[name] < runs["plain"].temp_bytes


def test_every_launch_has_copies_of_what_it_writes_over() -> None:
    """So that what is timed is never the result of the launch before, and nothing is copied under the clock."""
    gate, up = jnp.full(3, 2.0), jnp.ones(3)
    run = Program(lambda gate, up: gate * up + 1, gate, up, over=(0,), launches=3)
    assert run.seconds() > 0
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(run()), np.full(3, 3.0))
    assert not gate.is_deleted()


def test_launches_are_timed_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs once for all of them, and the copies are there before."""
    events = []

    def host_seconds(run: Any) -> float:
        events.append("start")
        run()
        events.append("end")
        return 6.0

    monkeypatch.setattr("tiled_jax.commands.bench_gpu.host_seconds", host_seconds)
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda a: (events.append("copy"), copy(a))[1])
    x = jnp.ones(3)
    run = Program(jnp.negative, x, over=(0,), launches=3)
    run()
    assert (WallClock().seconds(run), events) == (2.0, ["copy", *["copy"] * 3, "start", "end"])


def test_the_gradient_of_logits_takes_their_place() -> None:
    logits = draw(0, 8, 256, dtype=jnp.float32, scale=3.0)
    dlogits, found = logits_runs(8, 256, jnp.float32)["xla"]()
    np.testing.assert_array_equal(np.asarray(found.best), np.asarray(jnp.max(logits, axis=1)))
    targets = jnp.argmin(dlogits, axis=1)  # whose gradient alone is negative
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(targets, 256)
    assert_within(np.asarray(dlogits), np.asarray(expected), FLOOR["float32"], "dlogits")


def test_tune_writes_the_fastest_candidate(tmp_path: Path) -> None:
    table, tried = tmp_path / "blocks.json", []
    table.write_text("[]")

    def with_blocks(blocks: Blocks) -> Any:
        def run() -> None:
            tried.append(blocks)
            if blocks.stages == 4:
                raise RuntimeError("more shared memory than there is")

        return run

    def either(chosen: Any) -> Any:
        """ "dual" and "vendor" are the faster ones; what they run with is what has been chosen."""
        assert chosen["dgated"].stages == 3
        slow, fast = partial(time.sleep, 0.02), lambda: None
        return {"up": {"vendor": slow, "dual": fast}, "down": {"vendor": fast, "dgated": slow}}

    options = TuneOptions(repeats=1)
    assert tune_with(options, {"dgated": ((14336, 4096), with_blocks)}, either, table) == 0
    entry, paths = json.loads(table.read_text())
    assert (paths["op"], paths["shape"]) == ("paths", [14336, 4096])
    assert (paths["paths"]["up"], paths["paths"]["down"]) == ("dual", "vendor")
    assert (entry["kernels"], entry["op"], entry["shape"]) == ("pallas", "dgated", [14336, 4096])
    assert entry["blocks"]["stages"] == 3
    assert set(tried) == set(CANDIDATES["pallas"]["dgated"])


KERNELS = (
    "glu_up",
    "glu_up_auxiliary",
    "dgated",
    "linear",
    "dx",
    "weight_gradient",
    "glu_backward",
    "statistics_and_gradient",
)


def test_tune_compiles_each_candidate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are traced once a candidate, its blocks a part of what is traced, however often they are launched."""
    table, traced = tmp_path / "blocks.json", []
    table.write_text("[]")

    def stand_in(name: str) -> Any:
        def kernel(first: jax.Array, *rest: Any, blocks: Blocks, **static: Any) -> Any:
            traced.append((name, blocks))
            return (None, 2 * first) if name == "statistics_and_gradient" else 2 * first

        return kernel

    for name in KERNELS:
        monkeypatch.setattr(tuning, name, stand_in(name))
    assert tune_with(SMALL, launches(SMALL), lambda chosen: {}, table) == 0
    of_op = dict(zip(KERNELS, KERNELS, strict=True))
    of_op |= {
        "glu_up_auxiliary": "glu_up_aux",
        "glu_backward": "glu_elementwise",
        "statistics_and_gradient": "cross_entropy",
    }
    assert traced == [(name, blocks) for name in KERNELS for blocks in CANDIDATES["pallas"][of_op[name]]]


def test_tune_writes_blocks_of_every_op(tmp_path: Path) -> None:
    table = tmp_path / "blocks.json"
    table.write_text("[]")
    runs = {op: (shape, lambda blocks: lambda: None) for op, (shape, _) in launches(SMALL).items()}
    assert tune_with(SMALL, runs, lambda chosen: {}, table) == 0
    entries = json.loads(table.read_text())
    assert {entry["op"] for entry in entries} == {*CANDIDATES["pallas"], "paths"}


def test_tune_compares_every_way_to_make_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes the same h, or the same gradients, with the blocks it is given."""
    chosen = {op: CANDIDATES["pallas"][op][0] for op in ("glu_up", "glu_up_aux", "dgated")}
    options = TuneOptions(hidden=64, intermediate=128, tokens=130, dtype="bfloat16", repeats=1)
    for name in ("glu_up", "glu_up_auxiliary", "dgated"):
        monkeypatch.setattr(tuning, name, partial(getattr(tuning, name), interpret=interpreter()))
    with clean_interpreter():
        found = {part: {way: run() for way, run in runs.items()} for part, runs in ways(options, chosen).items()}
    assert {part: list(runs) for part, runs in found.items()} == {
        "up": ["vendor", "auxiliary", "dual"],
        "down": ["vendor", "dgated"],
    }
    h, d = found["down"]["vendor"]
    pairs = [(found["up"][way], found["up"]["vendor"]) for way in ("auxiliary", "dual")]
    pairs += zip(found["down"]["dgated"], (d["gate"], d["up"], h), strict=True)
    for one, other in pairs:
        one, other = (np.asarray(a, np.float32) for a in (one, other))
        assert relative_error(one, other) <= float(jnp.finfo(jnp.bfloat16).eps)


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(InputError, match=r"^tune: a GPU must be there that the kernels run on\. A Pallas kernel needs"):
        tune(TuneOptions())
    with pytest.raises(InputError, match="--device gpu needs a GPU that JAX sees, and there is none"):
        bench(BenchOptions(op="kernels", device="gpu"))

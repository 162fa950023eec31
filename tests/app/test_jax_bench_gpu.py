"""`bench --device gpu` at tiny sizes on a CPU: what a GPU session will run must run; the kernels say why they cannot."""

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.app.gpu.bench import KERNEL_GROUPS, bench_jobs
from shared_specs.app.gpu.supervisor import Found
from shared_specs.app.gpu.worker import serve
from shared_specs.app.options import BenchOptions, InputError, TuneOptions
from shared_specs.kernels.blocks import CANDIDATES, Blocks
from shared_specs.kernels.roofline import GPUS
from shared_specs.tolerances import FLOOR, between, between_rows
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.kernels.jax_interpreted import FINDS_RACES, clean_interpreter
from tiled_jax.commands.bench.bench import bench
from tiled_jax.commands.gpu import candidates as tuned
from tiled_jax.commands.gpu import kernels, models
from tiled_jax.commands.gpu.candidates import QUESTIONS, candidates, ways
from tiled_jax.commands.gpu.device import JaxDevice, Program, distance, variant
from tiled_jax.commands.gpu.kernels import cross_entropy, draw, kernel_questions
from tiled_jax.commands.gpu.models import LOSS_GROUPS, Losses, MLPs, loss_groups, mlp_groups
from tiled_jax.commands.gpu.tune import tune
from tiled_jax.commands.gpu.worker import NO_GPU, groups_of, refusal

KERNELS = ("pallas", "tiled-pallas", "tiled-deterministic", "auxiliary", "dual", "dgated")


def rows_of(op: str, stage: str = "") -> dict[str, dict[str, Any]]:
    """Of one job of toys, measured in this process."""
    (job, *_) = (
        job
        for job in bench_jobs(BenchOptions(op=op, device="gpu", toy=True, widths="toy"), "tiled_jax")
        if stage in ("", *job.groups)
    )
    found = Found(job)
    serve({**asdict(job), "seconds": 600.0}, groups_of(asdict(job)), JaxDevice(), found.take)
    return {f"{row['group']}/{row['variant']}": row for row in found.lines()}


def assert_xla_ran(rows: dict[str, dict[str, Any]]) -> None:
    """Kernels and tokamax cannot, with their reason."""
    for name, row in rows.items():
        kernel = row["variant"].startswith((*KERNELS, "tokamax"))
        assert kernel == ("left_out" in row), row
        if not kernel and row["variant"].startswith("tiled"):
            assert row["compared_with"] == "plain", row
        if not kernel:
            assert isinstance(row["temp_bytes"], int), name


@pytest.mark.slow
def test_the_kernels_say_why_they_cannot_run() -> None:
    rows = rows_of("kernels")
    assert_xla_ran(rows)
    assert {name.partition("/")[0] for name in rows} == set(KERNEL_GROUPS)
    assert rows["glu_backward/xla"]["traffic"] == 6 * 4 * 128 * 32
    memory = {"glu/xla", "glu_backward/xla", "cross_entropy/xla", "ceilings/copy"}
    assert {name for name, row in rows.items() if row.get("gbytes_per_second")} == memory


@pytest.mark.deep
@pytest.mark.parametrize(
    ("op", "stage"),
    [
        ("mlp", "main"),
        *(
            pytest.param(*job, marks=pytest.mark.slow)
            for job in (("mlp", "rest"), *(("loss", one) for one in LOSS_GROUPS))
        ),
    ],
)
def test_whole_models(op: str, stage: str) -> None:
    rows = rows_of(op, stage)
    assert_xla_ran(rows)
    if stage == "main":
        assert all(row["predicted_bytes"] for name, row in rows.items() if "tiled-xla" in name)
    if op == "mlp" and stage == "main":
        assert {"main/tiled-xla", "main/products-22", "main/products-18"} <= set(rows)
        assert "A Pallas kernel needs a Hopper GPU" in rows["main/tiled-pallas"]["left_out"]


@pytest.mark.deep
def test_whole_layers_by_every_scope() -> None:
    """Compared with checkpointed plain layers; of blocks the bytes are predicted, fewer where inputs wait on the host."""
    rows = rows_of("layer", "main")
    assert set(rows) == {"main/checkpoint", "main/mlp", "main/block", "main/block-offload"}
    for name, row in rows.items():
        assert row["median_seconds"] > 0, row
        assert row["compared_with"] == (None if name == "main/checkpoint" else "checkpoint")
    assert 0 < rows["main/block-offload"]["predicted_bytes"] < rows["main/block"]["predicted_bytes"]


def test_flop_are_those_of_the_products() -> None:
    """Counted in the programs that are timed, those by kernels in the same ones by XLA; nothing runs."""
    sizes: dict[str, Any] = {"tokens": 96, "hidden": 16, "width": 24, "shard": 32, "dtype": jnp.float32}
    counted = 0
    groups: Any = {
        **mlp_groups(**sizes),
        "loss": loss_groups(tokens=96, hidden=16, vocab=50, shards=(32,), dtype=jnp.float32)["main"],
    }
    for group, make in groups.items():
        for name, one in make().items():
            if "pallas" in name or name in ("tiled-deterministic", "tokamax"):
                continue
            assert flop(one.run.fn, *one.run.arguments) == one.flop, f"{group}/{name}"
            counted += 1
    assert counted >= 16


def test_rows_know_what_the_model_of_the_time_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it knows; more products take longer. Nothing runs."""
    for module in (kernels, models):
        monkeypatch.setattr(module, "gpu_named", lambda name: GPUS["h200"])
    sizes: dict[str, Any] = {"tokens": 96, "hidden": 16, "width": 24, "shard": 32, "dtype": jnp.bfloat16}
    main = mlp_groups(**sizes)["main"]()
    seconds = {name: one.model_seconds for name, one in main.items()}
    assert 0 < seconds["products-18"] < seconds["products-22"] < seconds["tiled-xla"]
    assert 0 < seconds["tiled-pallas"] < seconds["tiled-xla"]
    losses = loss_groups(tokens=96, hidden=16, vocab=50, shards=(32,), dtype=jnp.bfloat16)["main"]()
    assert 0 < losses["tiled-pallas-32"].model_seconds < losses["tiled-xla-32"].model_seconds
    for name, question in kernel_questions(64, 16, 32, 16, 50, jnp.bfloat16).items():
        assert name == "ceilings" or all(one.model_seconds > 0 for one in question().values()), name


@pytest.mark.deep
def test_a_program_that_fails_compiles_nothing_again() -> None:
    """A variant that is refused is a row; the others are compiled once each, when they run first."""
    traced = []

    def doubled(x: jax.Array) -> jax.Array:
        traced.append(1)
        return 2 * x

    def refusing(x: jax.Array) -> jax.Array:
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory")

    x = jnp.ones(4)
    variants = {
        "good": variant(doubled, x, names=("y",), library=True),
        "bad": variant(refusing, x, names=("y",)),
        "wrong": variant(jnp.sin, x, names=("y",)),
        "last": variant(lambda x: x + x, x, names=("y",)),
    }
    assert not traced
    job: dict[str, Any] = {"groups": ["a"], "seconds": 60.0, "repeats": 3, "dtype": "float32"}
    events: list[dict[str, Any]] = []
    serve(job, {"a": lambda: variants}, JaxDevice(), events.append)
    reasons = {event["variant"]: event["reason"] for event in events if event["event"] == "left_out"}
    assert reasons["bad"].startswith("MemoryError: RESOURCE_EXHAUSTED")
    assert reasons["wrong"].startswith("wrong: y: relative error")
    assert [sorted(event["seconds"]) for event in events if event["event"] == "turn"] == [["good", "last"]] * 3
    assert len(traced) == 1


def test_distances() -> None:
    right = draw(0, 64, 48, dtype=jnp.float32)
    assert distance(right, right) == (0.0, 0.0)
    for wrong in (jnp.nan, jnp.inf):
        assert not max(distance(right.at[5].set(wrong), right)) <= 1e9
    whole, row = distance(right.at[5].set(0.0), right)
    assert 0.99 < row < 1.01
    assert 1 / 16 < whole < 1 / 4
    assert distance(jnp.float32(2), jnp.float32(1)) == (1.0, 1.0)
    assert distance(jnp.zeros(3), jnp.zeros(3)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="shape"):
        distance(right[:5], right)
    with pytest.raises(ValueError, match="nothing to compare dz with"):
        JaxDevice().distances({"dz": right}, {"dx": right})


def test_the_bytes_of_a_program() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ jnp.cos(x).T

    x = jnp.ones((64, 32))
    run = Program(fn, x)
    assert run.temp_bytes is None
    run()
    assert run.temp_bytes == temp_bytes(fn, x) > 0


def test_the_tiled_variants_keep_to_the_prediction() -> None:
    mlps = MLPs(tokens=1024, hidden=64, width=128, shard=256, dtype=jnp.float32)
    plain, tiled = mlps.plain(), mlps.own("xla")
    for one in (plain, tiled):
        one.run()
    found, predicted = tiled.facts()["temp_bytes"], tiled.predicted_bytes
    assert predicted is not None
    assert predicted / 2 < found <= predicted < plain.facts()["temp_bytes"]


def test_the_tiled_losses_keep_to_the_prediction() -> None:
    losses = Losses(tokens=512, hidden=64, vocab=1000, shards=(64, 128), dtype=jnp.float32)
    plain = losses.plain()
    plain.run()
    for shard in (64, 128):
        tiled = losses.own("xla", shard)
        tiled.run()
        found, predicted = tiled.facts()["temp_bytes"], tiled.predicted_bytes
        assert predicted / 2 < found <= predicted < plain.facts()["temp_bytes"]


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

    monkeypatch.setattr("tiled_jax.commands.gpu.device.host_seconds", host_seconds)
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda a: (events.append("copy"), copy(a))[1])
    one = variant(jnp.negative, jnp.ones(3), names=None, over=(0,), launches=3)
    one.run()
    assert (JaxDevice().seconds(one), events) == (2.0, ["copy", *["copy"] * 3, "start", "end"])


def test_the_gradient_of_logits_takes_their_place() -> None:
    logits = draw(0, 8, 256, dtype=jnp.float32, scale=3.0)
    dlogits, lse, _ = cross_entropy(8, 256, jnp.float32)["xla"].run()
    assert_within(np.asarray(lse), np.asarray(jax.nn.logsumexp(logits, axis=1)), FLOOR["float32"], "lse")
    targets = jnp.argmin(dlogits, axis=1)  # whose gradient alone is negative
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(targets, 256)
    assert_within(np.asarray(dlogits), np.asarray(expected), FLOOR["float32"], "dlogits")


def test_candidates_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are traced once a candidate, its blocks a part of what is traced, however often they are launched."""
    sizes: dict[str, Any] = {"tokens": 16, "hidden": 128, "width": 128, "vocab": 128, "dtype": jnp.bfloat16}
    assert QUESTIONS.keys() == CANDIDATES["pallas"].keys()
    traced = []

    def kernel(*operands: jax.Array, blocks: Blocks) -> jax.Array:
        traced.append(blocks)
        return operands[0]

    for op in ("dgated", "cross_entropy"):
        traced.clear()
        monkeypatch.setitem(QUESTIONS, op, (QUESTIONS[op][0], kernel))
        variants = candidates(op, **sizes)
        assert list(variants) == ["xla", *map(str, range(len(CANDIDATES["pallas"][op])))]
        for name, one in variants.items():
            for _ in range(2 if name != "xla" else 0):
                one.run()
                one.run.seconds()
        assert traced == [*CANDIDATES["pallas"][op]]


@pytest.mark.deep
def test_every_way_to_make_an_mlp_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """h, or the gradients, with the blocks that are given, the kernels in the interpreter."""
    chosen = {op: asdict(CANDIDATES["pallas"][op][0]) for op in ("glu_up", "glu_up_aux", "dgated")}
    sizes: dict[str, Any] = {"tokens": 130, "hidden": 64, "width": 128, "vocab": 128, "dtype": jnp.bfloat16}
    monkeypatch.setenv("TILED_PALLAS_INTERPRET", "1")
    asked = []
    glu_up = tuned.glu_up
    monkeypatch.setattr(tuned, "glu_up", lambda *a, **k: (asked.append(k["blocks"]), glu_up(*a, **k))[1])
    with clean_interpreter():
        for part, names in (("up", ["vendor", "auxiliary", "dual"]), ("down", ["vendor", "dgated"])):
            found = {name: one.results() for name, one in ways(part, chosen, **sizes).items()}
            assert list(found) == names
            assert_close(found)
    assert asked == [CANDIDATES["pallas"]["glu_up"][0]]


def assert_close(found: dict[str, Any]) -> None:
    """To the first of them."""
    expected, *others = found.values()
    for other in others:
        for whole, row in JaxDevice().distances(other, expected).values():
            assert whole <= between("bfloat16")
            assert row <= between_rows("bfloat16")


@pytest.mark.slow
@pytest.mark.skipif(not FINDS_RACES, reason="the interpreter of jax 0.10 takes minutes for these")
@pytest.mark.parametrize("question", [name for name in KERNEL_GROUPS if name != "ceilings"])
def test_questions_by_kernels(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILED_PALLAS_INTERPRET", "1")
    with clean_interpreter():
        variants = kernel_questions(130, 128, 128, 16, 256, jnp.bfloat16)[question]()
        assert len(variants) > 1
        assert_close({name: one.results() for name, one in variants.items()})


@pytest.mark.slow
@pytest.mark.skipif(not FINDS_RACES, reason="the interpreter of jax 0.10 takes minutes for these")
@pytest.mark.parametrize("op", QUESTIONS)
def test_candidates_compute_what_xla_does(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILED_PALLAS_INTERPRET", "1")
    with clean_interpreter():
        variants = candidates(op, tokens=130, hidden=128, width=128, vocab=256, dtype=jnp.bfloat16)
        assert_close({name: variants[name].results() for name in ("xla", "0")})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_harness(tmp_path: Path) -> None:
    """Every job in processes of their own, as on a GPU, packed into one archive."""
    options = BenchOptions(op="all", device="gpu", toy=True, widths="toy", minutes=12.0, out=str(tmp_path))
    jobs = bench_jobs(options, "tiled_jax")
    assert bench(options) == 0
    assert tune(TuneOptions(toy=True, out=str(tmp_path), minutes=8.0)) == 0
    archives = sorted(tmp_path.iterdir())
    assert [archive.name.split("-20")[0] for archive in archives] == ["gpu-jax-all", "gpu-tune-jax"]
    with tarfile.open(archives[0]) as tar:
        records = [json.loads(tar.extractfile(name).read()) for name in tar.getnames() if name.endswith(".json")]
    assert {record["kind"] for record in records} == {f"gpu-{job.op}-{job.name}" for job in jobs}
    for record in records:
        assert_xla_ran({f"{row['group']}/{row['variant']}": row for row in record["results"]})


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU here")
    facts = {"toy": False}
    assert refusal({"op": "tune", "facts": facts}) == f"tune: {NO_GPU['tune']}."
    with pytest.raises(InputError, match=f"^bench: {NO_GPU['bench']}.$"):
        bench(BenchOptions(op="kernels", device="gpu", out=str(tmp_path)))
    assert not [*tmp_path.iterdir()], "an archive of nothing was kept"
    with pytest.raises(InputError, match=r"^tune: --dtype must be bfloat16 or float16"):
        tune(TuneOptions(dtype="float32"))

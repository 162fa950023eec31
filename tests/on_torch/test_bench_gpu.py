"""`bench --device gpu` at tiny sizes on a CPU, its kernels in the interpreter: what a GPU session will run must run."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import tests.triton_interpreter  # noqa: F401
from shared_specs import blocks
from shared_specs.cli import BenchOptions, InputError, TuneOptions
from tiled_torch.commands.bench import bench
from tiled_torch.commands.bench_gpu import Sizes, kernel_runs, or_absent, run_part
from tiled_torch.commands.peers import PlainMLP, quack_loss, quack_mlp
from tiled_torch.commands.tune import tune, tune_on

# The interpreter computes with NumPy, which warns where a GPU just returns infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

EXPECTED = {
    "kernels": {"pytorch", "vendor", "auxiliary", "dual", "dgated", "kernel", "copy", "vendor, nothing added"},
    "mlp": {"plain", "tiled", "tiled-keep-1", "tiled-eager", "checkpoint", "tiled-in-checkpoint", "tiled-forward"},
    "loss": {"plain", "tiled-128-triton", "tiled-128-eager"},
}
# Measured, or a line with the reason.
PEERS = {
    "kernels": set(),
    "mlp": {"liger", "deepspeed", "quack", "quack-recompute", "compiled", "compiled-checkpoint"},
    "loss": {"liger", "quack", "compiled"},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the peers and torch's own compiler
@pytest.mark.parametrize(
    "op", [pytest.param("kernels", marks=pytest.mark.slow), "mlp", pytest.param("loss", marks=pytest.mark.slow)]
)
def test_every_part_writes_records(op: str, tmp_path: Path) -> None:
    options = BenchOptions(op=op, device="gpu", repeats=1, out=str(tmp_path))
    sizes = {"widths": {"tiny": (16, 32)}, "tokens": (130, 140, 150), "shards": (128, 130, 256), "vocab": 50}
    assert run_part(options, torch.device("cpu"), torch.float32, **sizes) == 0
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    lines = [line for record in records for line in record["results"]]
    assert {line["variant"] for line in lines if "median_seconds" in line} >= EXPECTED[op]
    assert {line["variant"] for line in lines} >= PEERS[op]
    for line in lines:  # compiled forms and peers may be missing here, with their reason; ours may not
        assert "median_seconds" in line or (line["left_out"] and not line["variant"].startswith("tiled"))
    if op == "loss":
        tiled = {line["variant"] for line in lines if line["variant"].startswith("tiled")}
        assert all(record["predicted_bytes"].keys() == tiled for record in records)
    assert all(record["gpu"] == {"name": "cpu"} and record["shape"]["hidden"] == 16 for record in records)


def test_no_question_changes_what_another_reads() -> None:
    """Over and over, in place: products of what is left would be products of zeros."""
    sizes = Sizes(name="tiny", tokens=128, hidden=16, width=32)
    questions = {name: runs for name, (runs, _) in kernel_runs(sizes, torch.float32, torch.device("cpu")).items()}
    before = questions["linear"]["vendor"]().clone()
    for _ in range(20):
        for name in ("up", "glu", "glu_backward", "down"):
            for run in questions[name].values():
                run()
    assert torch.equal(questions["linear"]["vendor"](), before)


def test_no_workload_begins_after_the_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(op="mlp", device="gpu", repeats=1, minutes=1e-9, out=str(tmp_path))
    sizes = {"widths": {"tiny": (16, 32)}, "tokens": (130, 140, 150), "shards": (128, 130, 256), "vocab": 50}
    assert run_part(options, torch.device("cpu"), torch.float32, **sizes) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        f"tiny-{total}-{shard}" for total, shard in ((150, 130), (140, 128), (140, 130), (130, 130))
    ]
    assert all(line.endswith("left out: the 1e-09 minutes of --minutes are over") for line in said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [quack_mlp, quack_loss], ids=lambda make: make.__name__)
def test_a_peer_that_fails_to_load_is_a_line_with_the_reason(make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"{name}: CUDA_HOME is not set")

    monkeypatch.setattr(importlib, "import_module", broken)
    arguments = (PlainMLP(4, 8, torch.float32),) if make is quack_mlp else ()
    run = or_absent(lambda: make(*arguments, **({"recompute": True} if arguments else {})))
    with pytest.raises(ImportError, match=r"OSError: quack.*CUDA_HOME is not set"):
        run(torch.ones(1))


@pytest.mark.slow
def test_tune_writes_what_the_kernels_then_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "blocks.json"
    table.write_text("[]")
    options = TuneOptions(hidden=16, intermediate=32, vocab=50, tokens=32, dtype="float32", repeats=1)
    assert tune_on(options, torch.device("cpu"), table) == 0
    entries = json.loads(table.read_text())
    assert {entry["op"] for entry in entries} == {
        "glu_up", "glu_up_aux", "glu_elementwise", "dgated", "dx", "linear", "weight_gradient", "cross_entropy", "paths",
    }  # fmt: skip
    assert tune_on(options, torch.device("cpu"), table) == 0
    first, entries = entries, json.loads(table.read_text())
    assert len(entries) == len(first)  # replaced, not added
    monkeypatch.setattr(blocks, "TUNED", table)
    blocks._tuned.cache_clear()
    for entry in entries:
        key = ("triton", entry["architecture"], "float32", tuple(entry["shape"]))
        if entry["op"] != "paths":
            assert asdict(blocks.blocks_for(key[0], entry["op"], *key[1:])) == entry["blocks"]
    blocks._tuned.cache_clear()


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match="--device gpu needs a GPU that PyTorch sees, and there is none"):
        bench(BenchOptions(op="kernels", device="gpu"))
    with pytest.raises(InputError, match=r"^tune: a GPU must be there"):
        tune(TuneOptions())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"op": "kernels"}, "bench: --op must be one of mlp, loss, accuracy on a cpu, got kernels."),
        ({"op": "mlp", "device": "gpu", "workload": "1b-4k"}, "bench: --workload must be left out with --device gpu"),
        ({"op": "mlp", "device": "gpu", "minutes": 0.0}, "bench: --minutes must be > 0, got 0."),
        ({"op": "mlp", "minutes": 3.0}, "bench: --minutes must be left out on a cpu"),
        (
            {"op": "accuracy", "device": "gpu"},
            "bench: --op must be one of mlp, loss, kernels on a gpu, got accuracy.",
        ),
        (
            {"op": "accuracy", "workload": "1b-4k"},
            "bench: --workload must be one of smollm2-135m-256-shards, got 1b-4k.",
        ),
        (
            {"op": "accuracy", "repeats": 3},
            "bench: --repeats must be left out with --op accuracy, which times nothing.",
        ),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(InputError) as caught:
        BenchOptions(**given).check()
    assert str(caught.value).startswith(message)

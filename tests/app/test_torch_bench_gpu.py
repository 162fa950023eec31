"""`bench --device gpu` at tiny sizes on a CPU, its kernels in the interpreter: what a GPU session will run must run."""

import importlib
import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tests.triton_interpreter  # noqa: F401
from shared_specs.app.bench.tune import best_blocks, best_paths
from shared_specs.app.gpu.bench import KERNEL_GROUPS, bench_jobs
from shared_specs.app.gpu.supervisor import Found
from shared_specs.app.gpu.worker import Variant, serve
from shared_specs.app.options import BenchOptions, InputError, TuneOptions
from shared_specs.kernels import blocks
from shared_specs.kernels.roofline import GPUS
from tests.core.torch_counting import GemmFlop
from tests.gpu.test_large import check
from tiled_torch.commands.bench.bench import bench
from tiled_torch.commands.bench.peers import PlainMLP, quack_loss, quack_mlp
from tiled_torch.commands.gpu.device import TorchDevice, distance
from tiled_torch.commands.gpu.kernels import kernel_questions
from tiled_torch.commands.gpu.models import LOSS_GROUPS, MLP_GROUPS, loss_groups, mlp_groups, or_absent
from tiled_torch.commands.gpu.tune import tune
from tiled_torch.commands.gpu.worker import TUNED, groups_of
from tiled_torch.core import launch

# The interpreter computes with NumPy, which warns where a GPU just returns infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
CPU = torch.device("cpu")
# Measured, or a row with the reason.
PEERS = {"liger", "liger-in-checkpoint", "deepspeed", "deepspeed-in-checkpoint", "quack", "quack-recompute"}
PEERS |= {"compiled", "compiled-checkpoint"}


def rows_of(op: str, stage: str = "") -> dict[str, dict[str, Any]]:
    """Of one job of toys, measured in this process."""
    (job, *_) = (
        job
        for job in bench_jobs(BenchOptions(op=op, device="gpu", toy=True, widths="toy"), "tiled_torch")
        if stage in ("", *job.groups)
    )
    found = Found(job)
    serve({**asdict(job), "seconds": 600.0}, groups_of(asdict(job), CPU), TorchDevice(CPU), found.take)
    return {f"{row['group']}/{row['variant']}": row for row in found.lines()}


def assert_ours_ran(rows: dict[str, dict[str, Any]]) -> None:
    """Peers may be missing here, with their reason."""
    for name, row in rows.items():
        peer = name.partition("/")[2] in PEERS
        assert "median_seconds" in row or (peer and row["left_out"]), row
        if not peer and row["variant"].partition("-")[0] in ("tiled", "kernel", "dual", "dgated", "auxiliary"):
            assert row["compared_with"] in ("plain", "pytorch", "vendor"), row


def test_the_kernels_are_compared_and_timed() -> None:
    rows = rows_of("kernels")
    assert_ours_ran(rows)
    assert {name.partition("/")[0] for name in rows} == set(KERNEL_GROUPS)
    # Of what moves memory the bytes a second are told, of products the FLOP.
    memory = {"glu", "glu_backward", "cross_entropy"}
    for name, row in rows.items():
        group, variant = name.split("/")
        assert (row["gbytes_per_second"] is None) == (group not in memory and variant != "copy"), name
        assert (row["tflops"] is None) == (row["gbytes_per_second"] is not None), name
    pass_bytes = 4 * 128 * 32
    assert rows["glu/kernel"]["traffic"] == 3 * pass_bytes
    assert rows["glu_backward/kernel"]["traffic"] == 6 * pass_bytes
    assert rows["cross_entropy/kernel"]["traffic"] == 2 * 4 * 64 * 50


def test_the_main_rows_of_an_mlp() -> None:
    rows = rows_of("mlp", "main")
    assert_ours_ran(rows)
    assert {"main/plain", "main/tiled", "main/tiled-in-checkpoint", "main/products-22", "main/products-18"} <= set(rows)
    assert rows["main/tiled"]["predicted_bytes"] > 0


@pytest.mark.filterwarnings("ignore:tile_model. the loss of Qwen3ForCausalLM")  # its layers are called one by one
def test_whole_layers_by_every_scope() -> None:
    """Compared with checkpointed plain layers; of blocks the bytes are predicted, fewer where inputs wait on the host."""
    rows = rows_of("layer", "main")
    assert set(rows) == {"main/checkpoint", "main/mlp", "main/block", "main/block-offload"}
    for name, row in rows.items():
        assert row["median_seconds"] > 0, row
        assert row["compared_with"] == (None if name == "main/checkpoint" else "checkpoint")
    assert 0 < rows["main/block-offload"]["predicted_bytes"] < rows["main/block"]["predicted_bytes"]
    assert set(rows_of("layer", "long")) == {"long/checkpoint", "long/block", "long/block-offload"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the peers and torch's own compiler
@pytest.mark.parametrize(
    ("op", "stage"), [("mlp", "peers"), ("mlp", "rest"), *(("loss", stage) for stage in LOSS_GROUPS)]
)
def test_the_other_rows(op: str, stage: str) -> None:
    rows = rows_of(op, stage)
    assert_ours_ran(rows)
    if stage == "rest":
        assert {"rest/tiled-deterministic", "rest/products-20", "rest/quack", "rest/compiled"} <= set(rows)
    if stage == "main":
        assert all(row["predicted_bytes"] for name, row in rows.items() if "tiled" in name)


def test_flop_are_those_of_the_products() -> None:
    """Counted as they run, of plain by PyTorch too; the tiled forms by eager operations, whose products are the kernels'."""
    sizes: dict[str, Any] = {"tokens": 96, "hidden": 16, "width": 24, "shard": 32, "dtype": torch.float32}
    groups: Any = mlp_groups(**sizes, device=CPU, backend="eager")
    groups = {name: groups[name] for name in MLP_GROUPS}
    counted = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda fn: fn)
        variants = [(f"{group}/{name}", v) for group, make in groups.items() for name, v in make().items()]
    for name, variant in variants:
        if "deterministic" in name or "quack" in name:  # kernels, and what is not there
            continue
        counted += _check_flop(name, variant)
    assert counted > 20
    with FlopCounterMode(display=False) as theirs:
        dict(variants)["main/plain"].run()
    assert theirs.get_total_flops() == dict(variants)["main/plain"].flop
    losses: Any = loss_groups(
        tokens=96, hidden=16, vocab=50, shards=(32, 64), dtype=torch.float32, device=CPU, backends=("eager",)
    )
    for group, number in (("main", 3), ("ignored", 3)):
        variants = losses[group]()
        variants.pop("liger", None)  # its own
        assert sum(_check_flop(name, variant) for name, variant in variants.items()) == number


def _check_flop(name: str, variant: Variant) -> bool:
    with GemmFlop() as counter:
        try:
            variant.run()
        except ImportError:
            return False
    assert counter.flop == variant.flop, name
    return True


def test_no_question_changes_what_it_reads() -> None:
    """Over and over, in place: products of what is left would be products of zeros."""
    for name, question in kernel_questions(128, 16, 32, 16, 50, torch.float32, CPU).items():
        if name == "ceilings":
            continue
        variants = question()
        reference = next(iter(variants.values()))
        before = reference.results()
        for variant in variants.values():
            for _ in range(3):
                if variant.before is not None:
                    variant.before()
                variant.run()
        after = reference.results()
        assert all(torch.equal(after[key], before[key]) for key in before), name


def test_what_a_kernel_does_not_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the form before it left in the same buffers, and not what memory happened to hold."""
    questions = kernel_questions(128, 16, 32, 16, 50, torch.float32, CPU)
    expected = questions["glu"]()["pytorch"].results()
    monkeypatch.setattr("tiled_torch.mlp.kernels.glu_elementwise.glu_forward", lambda *a: None)
    found = questions["glu"]()["kernel"].results()
    assert found["h"].isnan().all()
    assert not TorchDevice(CPU).distances(found, expected)["h"][0] <= 1.0
    with TorchDevice(CPU).poisoned():
        assert torch.empty(3).isnan().all()


def test_the_check_at_full_size_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of tests/gpu/test_large.py, by a kernel that leaves the last rows alone."""
    variants = kernel_questions(130, 16, 32, 16, 50, torch.float32, CPU)["glu_backward"]()
    check(TorchDevice(CPU), variants)
    whole = variants["kernel"].results
    assert whole is not None

    def without_the_end() -> dict[str, torch.Tensor]:
        found = dict(whole())
        found["dup"][-2:] = torch.nan
        return found

    variants["kernel"].results = without_the_end
    with pytest.raises(AssertionError, match="kernel, dup: nan"):
        check(TorchDevice(CPU), variants)


def test_distances() -> None:
    right = torch.randn(64, 48)
    assert distance(right.clone(), right) == (0.0, 0.0)
    for wrong, least in ((0.0, 0.1), (torch.nan, None), (torch.inf, None)):
        found = right.clone()
        found[5] = wrong
        whole, row = distance(found, right)
        if least is None:
            assert not whole <= 1e9
            assert not row <= 1e9
        else:
            assert 1 / 16 < whole < 1 / 4
            assert 0.99 < row < 1.01
    assert distance(torch.tensor(2.0), torch.tensor(1.0)) == (1.0, 1.0)
    assert distance(torch.zeros(3), torch.zeros(3)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="shape"):
        distance(right[:5], right)
    with pytest.raises(ValueError, match="nothing to compare dz with"):
        TorchDevice(CPU).distances({"dz": right}, {"dx": right})


@pytest.mark.parametrize("name", ["main/tiled", "main/products-22", "peers/liger-in-checkpoint"])
def test_rows_know_what_the_model_of_the_time_says(name: str) -> None:
    """On a device it knows; more products take longer."""
    group, variant = name.split("/")
    sizes: dict[str, Any] = {"tokens": 96, "hidden": 16, "width": 24, "shard": 32, "dtype": torch.bfloat16}
    variants = mlp_groups(**sizes, device=CPU, backend="eager", gpu=GPUS["h200"])[group]()
    assert variants[variant].model_seconds > 0
    if group == "main":
        assert variants["products-18"].model_seconds < variants["products-22"].model_seconds
    questions = kernel_questions(128, 16, 32, 16, 50, torch.float32, CPU, GPUS["h200"])
    for question in ("up", "cross_entropy", "dx"):
        assert all(one.model_seconds > 0 for one_name, one in questions[question]().items() if one_name != "copy")


def test_a_gradient_that_is_missing_is_an_error() -> None:
    sizes: dict[str, Any] = {"tokens": 8, "hidden": 4, "width": 4, "shard": 4, "dtype": torch.float32, "device": CPU}
    from tiled_torch.commands.gpu.models import MLPs

    mlps = MLPs(**sizes, backend="eager")
    variant = mlps.step(lambda x: mlps.tiled(x.detach().requires_grad_()), 0)
    with pytest.raises(RuntimeError, match=r"^no dx$"):
        variant.results()


@pytest.mark.parametrize("make", [quack_mlp, quack_loss], ids=lambda make: make.__name__)
def test_a_peer_that_fails_to_load_is_a_line_with_the_reason(make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"{name}: CUDA_HOME is not set")

    monkeypatch.setattr(importlib, "import_module", broken)
    arguments = (PlainMLP(4, 8, torch.float32),) if make is quack_mlp else ()
    run = or_absent(lambda: make(*arguments, **({"recompute": True} if arguments else {})))
    with pytest.raises(ImportError, match=r"OSError: quack.*CUDA_HOME is not set"):
        run(torch.ones(1))


def test_candidates_run_with_their_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn, compared with the library's form; the fastest that is right is what is chosen."""
    monkeypatch.setattr(launch, "trying", {})
    sizes = {"tokens": 130, "hidden": 16, "intermediate": 32, "vocab": 50, "toy": True}
    job: dict[str, Any] = {"op": "tune", "groups": ["dgated"], "dtype": "float32", "facts": sizes}
    assert TUNED.keys() == blocks.CANDIDATES["triton"].keys()
    variants = groups_of(job, CPU)["dgated"]()
    assert list(variants) == ["pytorch", *map(str, range(len(blocks.CANDIDATES["triton"]["dgated"])))]
    for name, variant in list(variants.items())[1:]:
        variant.run()
        assert launch.trying["dgated"] == blocks.CANDIDATES["triton"]["dgated"][int(name)]
    rows = [{"group": "dgated", "variant": str(n), "median_seconds": 5.0 - n} for n in range(4)]
    rows[3] = {"group": "dgated", "variant": "3", "left_out": "wrong: h"}
    rows += [{"group": "dgated", "variant": "pytorch", "median_seconds": 0.1}]
    rows += [{"group": "dx", "variant": "0", "left_out": "out of shared memory"}]
    assert best_blocks("triton", rows) == {"dgated": blocks.CANDIDATES["triton"]["dgated"][2]}
    ways = [
        {"group": "up", "variant": name, "median_seconds": s}
        for name, s in (("pytorch", 1), ("dual", 2), ("vendor", 3))
    ]
    assert best_paths(ways) == {"up": "dual"}


@pytest.mark.slow
def test_tune_writes_what_the_kernels_then_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "blocks.json"
    table.write_text("[]")
    options = TuneOptions(toy=True, out=str(tmp_path / "out"), minutes=8.0, table=str(table))
    assert tune(options) == 0
    assert json.loads(table.read_text()) == []  # a toy leaves it as it is
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as tar:
        (name,) = (name for name in tar.getnames() if name.endswith("/blocks.json"))
        table.write_bytes(tar.extractfile(name).read())
    entries = json.loads(table.read_text())
    assert {entry["op"] for entry in entries} == {
        "glu_up", "glu_up_aux", "glu_elementwise", "dgated", "dx", "linear", "weight_gradient", "cross_entropy", "paths",
    }  # fmt: skip
    monkeypatch.setenv("TILED_TUNED_BLOCKS", str(table))
    blocks._tuned.cache_clear()
    for entry in entries:
        key = ("triton", entry["architecture"], "float32", tuple(entry["shape"]))
        if entry["op"] != "paths":
            assert asdict(blocks.blocks_for(key[0], entry["op"], *key[1:])) == entry["blocks"]
    blocks._tuned.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_harness(tmp_path: Path) -> None:
    """Every job in processes of their own, as on a GPU, packed into one archive."""
    options = BenchOptions(op="all", device="gpu", toy=True, widths="toy", minutes=12.0, out=str(tmp_path))
    jobs = bench_jobs(options, "tiled_torch")
    assert bench(options) == 0
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as tar:
        records = [json.loads(tar.extractfile(name).read()) for name in tar.getnames() if name.endswith(".json")]
    assert {record["kind"] for record in records} == {f"gpu-{job.op}-{job.name}" for job in jobs}
    for record in records:
        assert record["gpu"]["name"] == "cpu"
        assert record["shape"]["hidden"] == 16
        assert_ours_ran({f"{row['group']}/{row['variant']}": row for row in record["results"]})


@pytest.mark.deep
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match="--device gpu needs a GPU that PyTorch sees, and there is none"):
        bench(BenchOptions(op="kernels", device="gpu", out=str(tmp_path)))
    with pytest.raises(InputError, match=r"^tune: it needs a GPU that PyTorch sees, and there is none"):
        tune(TuneOptions(out=str(tmp_path), table=str(tmp_path / "table.json")))
    assert not [*tmp_path.iterdir()], "an archive of nothing was kept"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"op": "kernels"}, "bench: --op must be one of mlp, loss, accuracy, mesh, model on a cpu, got kernels."),
        ({"op": "mlp", "device": "gpu", "workload": "1b-4k"}, "bench: --workload must be left out with --device gpu"),
        ({"op": "mlp", "device": "gpu", "minutes": 0.0}, "bench: --minutes must be > 0, got 0."),
        ({"op": "mlp", "minutes": 3.0}, "bench: --minutes must be left out on a cpu"),
        (
            {"op": "accuracy", "device": "gpu"},
            "bench: --op must be one of mlp, loss, kernels, layer, all on a gpu, got accuracy.",
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

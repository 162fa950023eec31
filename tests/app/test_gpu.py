"""Jobs of `bench --device gpu` in processes of their own: what fails, hangs or is wrong is one row, and the rest go on."""

import json
import os
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.bench.workloads import GPU_SIZES
from shared_specs.app.gpu import bench as gpu_bench
from shared_specs.app.gpu.bench import NO_TIME, bench_jobs, mlp_workloads, packing
from shared_specs.app.gpu.supervisor import Job, run_jobs
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.tolerances import between, between_rows

COMMAND = [sys.executable, "-m", "tests.app.fake_worker"]


def job(name: str = "job", *, seconds: float = 60.0, repeats: int = 2, limit: float = 30.0, **groups: Any) -> Job:
    limits = {"first_seconds": limit, "run_seconds": limit}
    order = tuple(name for name, variants in groups.items() if isinstance(variants, list))
    return Job(name=name, op="mlp", groups=order, seconds=seconds, repeats=repeats, facts=groups, **limits)


def rows_of(jobs: list[Job], folder: Path, *, seconds: float = 60.0) -> list[dict[str, dict[str, Any]]]:
    found = run_jobs(jobs, COMMAND, seconds, folder / "log", spare=False)
    return [{f"{row['group']}/{row['variant']}": row for row in rows} for _, rows, _ in found]


def timed(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, row in rows.items() if row.get("median_seconds") == 0.5}


def test_what_cannot_be_run_is_a_row_each_and_the_others_are_timed(tmp_path: Path) -> None:
    """Also after an error that makes every later call of its process fail, and where the process is gone."""
    first = job(a=["plain", "raise", "sick", "good"], b=["plain", "die", "good"], nothing=["plain"])
    (rows,) = rows_of([first], tmp_path)
    assert timed(rows) == {"a/plain", "a/good", "b/plain", "b/good"}
    assert rows["a/raise"]["left_out"] == "MemoryError: out of memory"
    assert rows["a/sick"]["left_out"].startswith("RuntimeError: CUDA error: an illegal memory access")
    assert rows["b/die"]["left_out"] == "its process ended with exit status 9"
    assert rows["nothing/all"]["left_out"] == "MemoryError: no room for the data"
    assert rows["a/good"]["ratio_to_plain"] == 1.0
    assert rows["a/good"]["tflops"] == 6.0
    assert rows["a/good"]["turns"] == 2


def test_what_is_wrong_says_so_and_is_not_timed(tmp_path: Path) -> None:
    (rows,) = rows_of([job(a=["plain", "wrong", "nan", "good"])], tmp_path)
    assert timed(rows) == {"a/plain", "a/good"}
    for name in ("a/wrong", "a/nan"):
        assert rows[name]["wrong"] is True
        assert rows[name]["left_out"].startswith("wrong: y: relative error ")
        assert rows[name]["compared_with"] == "plain"
    assert rows["a/good"]["errors"] == {"y": 0.0}
    json.dumps(rows, allow_nan=False)


def test_where_no_library_form_runs_the_rows_say_that_nothing_was_compared(tmp_path: Path) -> None:
    (rows,) = rows_of([job(a=["raise", "good", "other"])], tmp_path)
    assert [rows[f"a/{name}"]["compared_with"] for name in ("good", "other")] == [None, None]
    assert "errors" not in rows["a/other"]


def test_what_hangs_is_ended_and_the_next_job_runs(tmp_path: Path) -> None:
    start = time.monotonic()
    found = rows_of([job(a=["plain", "hang", "good"], limit=1.5), job("next", a=["plain"])], tmp_path)
    assert found[0]["a/hang"]["left_out"] == "it took more than its 1.5 s"
    assert [timed(rows) for rows in found] == [{"a/plain", "a/good"}, {"a/plain"}]
    assert time.monotonic() - start < 45


def test_what_dies_in_a_later_turn_leaves_the_others_their_times(tmp_path: Path) -> None:
    (rows,) = rows_of([job(a=["plain", "late-die", "good"], repeats=5)], tmp_path)
    assert rows["a/late-die"]["left_out"] == "its process ended with exit status 9"
    assert rows["a/plain"]["turns"] == rows["a/good"]["turns"] == 1


def test_the_time_of_a_job_and_of_all_is_kept(tmp_path: Path) -> None:
    """Down to the variant: what is not begun and what is under way are rows."""
    start = time.monotonic()
    found = rows_of([job(a=["plain", "hang"], seconds=3.0), job("late", a=["plain"])], tmp_path, seconds=3.0)
    assert time.monotonic() - start < 15
    assert found[0]["a/hang"]["left_out"] == "the time of its job was over"
    assert found[1]["a/all"]["left_out"] == NO_TIME


def test_a_worker_that_dies_before_it_begins_is_a_row_and_not_a_loop(tmp_path: Path) -> None:
    (rows,) = rows_of([job(stillborn=True, a=["plain"], b=["plain"])], tmp_path)
    assert {row["left_out"] for row in rows.values()} == {"the process did not come to it"}


def test_a_worker_that_cannot_measure_here_ends_it_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^bench: no GPU$"):
        rows_of([job(refused=True, a=["plain"])], tmp_path)


def test_the_most_telling_workloads_of_every_width_come_first() -> None:
    jobs = bench_jobs(BenchOptions(op="all", device="gpu"), "tiled_torch")
    names = [f"{job.op} {job.name}" for job in jobs]
    assert names[:6] == [
        "mlp 8b-131072-8192-main",
        "mlp 70b-131072-8192-main",
        "kernels 8b",
        "kernels 70b",
        "loss 8b-32768-main",
        "loss 70b-32768-main",
    ]
    assert "8b" in names[-2]
    assert len(set(names)) == len(names)
    chosen = bench_jobs(BenchOptions(op="mlp", device="gpu", widths="70b"), "tiled_torch")
    assert {job.facts["width"] for job in chosen} == {"70b"}
    assert [job.name for job in chosen[:2]] == ["70b-131072-8192-main", "70b-131072-8192-peers"]
    few = bench_jobs(BenchOptions(op="all", device="gpu", widths="8b", groups="long,ignored"), "tiled_jax")
    assert [job.name for job in few] == ["qwen3-8b-1-262144-long", "8b-32768-ignored"]
    # What a target needs is measured before half of the time is over, if every job takes all that it may.
    assert sum(job.seconds for job in jobs[:6]) < 60 * 6


def test_shards_are_swept_where_they_are_several() -> None:
    """At 8192 tokens shards of 8192 and 16384 would be the same one; a shard longer than its tokens is left out."""
    shards = (2048, 4096, 8192, 16384)
    sweep = [(32768, shard) for shard in shards]
    assert mlp_workloads((8192, 32768, 131072), shards) == [(131072, 8192), *sweep, (8192, 8192)]
    assert mlp_workloads((4096, 8192, 16384), shards) == [(16384, 8192), *((8192, t) for t in shards[:3]), (4096, 8192)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widths": "8b,8b"}, "bench: --widths must be names among 8b, 70b, each once, got '8b,8b'."),
        ({"widths": "13b"}, "bench: --widths must be names among 8b, 70b, each once, got '13b'."),
        ({"widths": ""}, "bench: --widths must be names among 8b, 70b, each once, got ''."),
        (
            {"groups": "main,first"},
            "bench: --groups must be names among main, peers, rest, sweep, long, ignored, each once, got",
        ),
        ({"device": "cpu", "groups": "main"}, "bench: --groups must be left out on a cpu"),
        ({"device": "cpu", "widths": "8b"}, "bench: --widths must be left out on a cpu"),
        ({"device": "cpu", "toy": True}, "bench: --toy must be left out on a cpu"),
        ({"minutes": float("inf")}, "bench: --minutes must be > 0, got inf."),
    ],
)
def test_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        BenchOptions(**{"device": "gpu", **given}).check()
    assert str(caught.value).startswith(message)


def test_the_archive_holds_what_is_there_when_it_is_ended(tmp_path: Path) -> None:
    folders = []

    def ended() -> None:
        with packing(tmp_path / "out", "gpu-x") as pack:
            folders.append(pack.folder)
            (pack.folder / "record.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit):
        ended()
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as tar:
        assert [Path(name).name for name in tar.getnames()] == ["record.json"]
    assert not folders[0].exists()


def test_a_part_packs_a_record_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of its variants; the exit status says that one was wrong. The commit is what a variable says."""
    monkeypatch.setenv("TILED_COMMIT", "0123abc")
    monkeypatch.setattr(sys, "argv", ["tiled_torch", "bench", "--out", "/some/where/out"])
    jobs = [job("first", a=["plain", "wrong"]), job("second", a=["die"]), job("third", a=["plain"])]
    monkeypatch.setattr(gpu_bench, "bench_jobs", lambda options, half: jobs)
    monkeypatch.setattr(gpu_bench, "measuring", lambda jobs, half, *a, **k: run_jobs(jobs, COMMAND, *a, spare=False))
    options = BenchOptions(op="mlp", device="gpu", out=str(tmp_path))
    assert gpu_bench.bench_on_gpu(options, "tiled_torch", ("numpy",), peers="none") == 1
    (archive,) = tmp_path.iterdir()
    assert archive.name.startswith("gpu-torch-mlp-")
    with tarfile.open(archive) as tar:
        files = {Path(name).name: tar.extractfile(name).read() for name in tar.getnames()}
    records = [json.loads(text) for name, text in files.items() if name.endswith(".json")]
    assert sorted(record["kind"] for record in records) == ["gpu-mlp-first", "gpu-mlp-second", "gpu-mlp-third"]
    assert {record["commit"] for record in records} == {"0123abc"}
    assert {record["command"] for record in records} == {
        "python -m tiled_torch bench --out out"
    }  # no machine's folders
    assert all(record["gpu"]["name"] == "fake" and record["results"] for record in records)
    assert b"what a library prints" in files["worker.log"]


def test_a_missing_tile_is_more_than_what_is_allowed() -> None:
    """Of 128 columns among those of the widest rows, and of one step among all that are summed."""
    widest = max(i for _, i in GPU_SIZES.widths.values())
    tile, step = (2 * 128 / widest) ** 0.5, (64 / widest) ** 0.5
    assert between_rows("bfloat16") < tile
    assert between("bfloat16") < step

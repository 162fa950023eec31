"""`make gpu PART=first`: what matters most fits the nine minutes of a machine that is lent, by the records of one that was."""

import json
import os
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.gpu.bench import LAYER_MODEL, LAYERS, STAGES, bench_jobs
from shared_specs.app.options import BenchOptions
from shared_specs.app.plan.decoder import MODELS
from shared_specs.app.plan.search import step_seconds
from shared_specs.app.plan.setting import Setting
from shared_specs.kernels.roofline import GPUS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
# What the part is for; everything else is a gift.
MATTERS = (("mlp", "main"), ("kernels", ""), ("loss", "main"), ("layer", "main"), ("layer", "long"))
# Between two jobs: the next process has done its imports meanwhile, and opens the device.
BETWEEN = 2.0
# Until the first process is there, which nobody imported for.
START = 15.0


def minutes_of(half: str) -> float:
    """What the part gives the half's benchmark."""
    makefile = (ROOT / "Makefile").read_text()
    (found,) = re.findall(rf"{half} bench --device gpu --op all --widths 8b --minutes ([\d.]+)", makefile)
    return float(found)


def newest(kind: str, half: str) -> dict[str, Any] | None:
    found = sorted(RECORDS.glob(f"{kind}_{half}_*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    return json.loads(found[-1].read_text()) if found else None


def taken(record: dict[str, Any], scale: float = 1.0, turns: int | None = None, but: str = "") -> float:
    """Seconds of a record's rows: the first run, which compiles, and the timed ones.

    scale: how much longer a run takes. turns: how many are timed. but: a row that is not.
    """
    rows = [row for row in record["results"] if "median_seconds" in row and row["variant"] != but]
    more = [(scale - 1) * row["median_seconds"] for row in rows]
    timed = [(turns or row["turns"]) * scale * row["median_seconds"] for row in rows]
    return sum(row["first_seconds"] for row in rows) + sum(more) + sum(timed)


def at_full_size(half: str) -> dict[tuple[str, str], float]:
    """Seconds of what matters, by its newest record.

    There is none of the long layer: it takes as many times the seconds of the main ones as the model of a step says.
    """
    seconds = {}
    for job in bench_jobs(BenchOptions(op="all", device="gpu", widths="8b"), half):
        stage = (job.op, job.groups[0] if job.op != "kernels" else "")
        if stage in MATTERS:
            record = newest(f"gpu-{job.op}-{job.name}", half)
            if record is None and stage == ("layer", "long"):
                seconds[stage] = taken(newest_main_layers(half), of_the_main_layers(), job.repeats, "mlp") + BETWEEN
            else:
                assert record is not None, stage
                seconds[stage] = taken(record) + BETWEEN
    return seconds


def newest_main_layers(half: str) -> dict[str, Any]:
    layers, tokens = LAYERS["main"]
    record = newest(f"gpu-layer-{LAYER_MODEL}-{layers}-{tokens}-main", half)
    assert record is not None
    return record


def of_the_main_layers() -> float:
    """How many times as long as the main layers the long one takes."""

    def model(group: str) -> float:
        layers, tokens = LAYERS[group]
        setting = Setting(tokens=tokens, scope="block")
        return step_seconds(replace(MODELS[LAYER_MODEL], layers=layers, vocab=8), setting, GPUS["h200"])

    return model("long") / model("main")


@pytest.mark.parametrize("half", ["tiled_torch", "tiled_jax"])
def test_what_matters_most_fits_its_time_at_full_size(half: str) -> None:
    """By the seconds that an H200 took for each row; and CONTRIBUTING says how many they are."""
    seconds = at_full_size(half)
    assert set(seconds) == set(MATTERS)
    total = START + sum(seconds.values())
    print(half, {name: round(value, 1) for name, value in seconds.items()}, round(total))
    assert total <= 60 * minutes_of(half)
    said = re.search(rf"`{half}` (\d+) of its (\d+) seconds", " ".join((ROOT / "CONTRIBUTING.md").read_text().split()))
    assert said
    assert int(said[1]) == round(total)
    assert int(said[2]) == round(60 * minutes_of(half))


def test_what_matters_most_comes_first() -> None:
    """A stage that matters stands behind none that matters less, but for one of seconds."""
    order = [(op, group) for op, group, _ in STAGES]
    assert order[: len(MATTERS) + 1] == [*MATTERS[:3], ("mlp", "peers"), *MATTERS[3:]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_part_at_toy_sizes_without_a_gpu(tmp_path: Path) -> None:
    """One command: three archives, and of what matters rows that ran and were right, in both halves.

    The tests of kernels need a GPU: none is chosen, which pytest tells by status 5, and the benchmarks run all the same.
    """
    python = ROOT / ".venv" / "bin" / "python"
    done = subprocess.run(
        [
            "make",
            "gpu",
            "PART=first",
            f"PYTHON={python}",
            "BENCH_ARGS=--toy --widths toy",
            "PYTEST_ARGS=-k no_test",
            f"OUT={tmp_path}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "parity: exit status 5" in done.stdout
    assert "Error 5" in done.stderr, done.stdout[-3000:] + done.stderr[-3000:]
    assert "results were wrong" not in done.stdout
    archives = {path.name.split("-20")[0]: path for path in tmp_path.iterdir()}
    assert set(archives) == {"gpu-parity", "gpu-torch-all", "gpu-jax-all"}
    for half in ("torch", "jax"):
        with tarfile.open(archives[f"gpu-{half}-all"]) as tar:
            names = [name for name in tar.getnames() if name.endswith(".json")]
            records = [json.loads(tar.extractfile(name).read()) for name in names]  # type: ignore[union-attr]
        for op in ("mlp", "kernels", "loss", "layer"):
            rows = [row for record in records if record["kind"].startswith(f"gpu-{op}") for row in record["results"]]
            assert any("median_seconds" in row for row in rows), f"{half}: nothing of {op} ran"

"""`make gpu PART=parity`: red tests, hanging ones and the end of the time stop nothing that comes after; and `make gpu`."""

import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from shared_specs.app.gpu import parity as gpu_parity
from shared_specs.app.gpu.parity import bounded, run_parity

ROOT = Path(__file__).parents[2]
IN_ORDER = ["-p", "no:randomly"]  # these folders know nothing of pyproject.toml
GREEN = "import pytest\n@pytest.mark.gpu\ndef test_green(): pass\ndef test_of_no_gpu(): assert False\n"

RED_AND_HANGING = """import time, pytest
pytestmark = pytest.mark.gpu
def test_wrong(): assert 1 == 2
def test_hanging(): time.sleep(600)
"""


def logs(out: Path) -> dict[str, str]:
    (archive,) = out.iterdir()
    with tarfile.open(archive) as tar:
        return {Path(name).name: tar.extractfile(name).read().decode() for name in tar.getnames()}


def parts(folder: Path, parity: str, large: str) -> dict[str, str]:
    tests = folder / "gpu"
    tests.mkdir()
    (tests / "test_parity.py").write_text(parity)
    (tests / "test_large.py").write_text(large)
    return {"tests": str(tests), "large": str(tests / "test_large.py")}


@pytest.mark.deep
def test_red_parity_does_not_stop_the_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parity, "side_by_side", list)
    files = parts(tmp_path, GREEN.replace("pass", "assert False"), GREEN)
    assert run_parity(tmp_path / "out", IN_ORDER, **files) == 1
    found = logs(tmp_path / "out")
    assert "1 failed, 1 deselected" in found["parity.log"]
    assert "1 passed, 1 deselected" in found["large.log"]
    assert 'tests="1"' in found["parity.xml"]


@pytest.mark.deep
def test_a_short_run_leaves_the_large_tests_out_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where something hangs: pytest is asked to end before it is ended."""
    monkeypatch.setattr(gpu_parity, "side_by_side", list)
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "test_some.py").write_text(RED_AND_HANGING)
    arguments = {"tests": str(folder), "large": "", "parity_seconds": 20.0, "all_seconds": 20.0}
    assert run_parity(tmp_path / "out", IN_ORDER, **arguments) == 124
    found = logs(tmp_path / "out")
    assert "large.log" not in found
    assert "assert 1 == 2" in found["parity.log"]


@pytest.mark.deep
def test_what_hangs_is_ended_and_the_rest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parity, "side_by_side", list)
    files = parts(tmp_path, "import time\ntime.sleep(600)\n", GREEN)
    assert run_parity(tmp_path / "out", IN_ORDER, parity_seconds=2.0, **files) == 124
    assert "1 passed" in logs(tmp_path / "out")["large.log"]


def test_a_command_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    start = time.monotonic()
    assert bounded([sys.executable, "-c", child], 1.0, tmp_path / "log") == 124
    assert bounded([sys.executable, "-c", "print('said'); raise SystemExit(3)"], 60.0, tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "said\n"
    assert time.monotonic() - start < 30


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_arguments_go_where_they_belong_and_every_part_is_bounded() -> None:
    said = make("-n", "gpu", "PYTHON=python3", "BENCH_ARGS=--widths 8b", "PYTEST_ARGS=-k graph", "OUT=there").stdout
    lines = [line for line in said.replace("\\\n", " ").replace(";", "\n").splitlines() if " -m " in line]
    assert len(lines) >= 4
    for line in said.split(" -m ")[:-1]:
        assert line.rstrip().endswith("timeout --kill-after=10 510 python3")
    assert said.count("--out there") == 9  # PART=first has three of them
    assert said.count("-k graph") == 2
    assert said.count("--op all --out there --widths 8b") == 2
    seconds = 100 + sum(60 * float(minutes) for minutes in re.findall(r"--minutes (2\.5|4\.1)", said))
    assert seconds <= 510


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    """And make says so in the end; a part nobody knows is an error."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\necho "$2 $TRITON_INTERPRET $JAX_PLATFORMS $GLOO_SOCKET_IFNAME"; [ "$2" != tiled_torch ]\n'
    )
    fake.chmod(0o755)
    done = make("gpu", f"PYTHON={fake}", f"OUT={tmp_path}")
    ran = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    halves = ["tiled_torch", "tiled_jax"]
    modules = ["shared_specs.app.gpu.parity", *halves, *halves, "shared_specs.app.gpu.profile"]
    assert ran == [f"{module} 0 cuda,cpu lo" for module in modules]
    assert done.returncode != 0
    assert make("gpu", f"PYTHON={fake}", "PART=jax").returncode == 0
    first = make("gpu", f"PYTHON={fake}", "PART=first").stdout.split("\n")
    assert [line.split()[0] for line in first[1:-1]] == ["shared_specs.app.gpu.parity", *halves]
    assert (
        "PART must be among first, parity, torch, jax, tune, got loss"
        in make("gpu", f"PYTHON={fake}", "PART=loss").stderr
    )

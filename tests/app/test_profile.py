"""The profile of dgated in `make gpu PART=tune`, with an `ncu` that is a script: told, bounded, and never a failure."""

import os
import sys
import time
from pathlib import Path

import pytest

from shared_specs.app.gpu.profile import main, profile

# Writes its report, and shows the arguments that decide what is profiled.
GOOD = """#!{python}
import sys
words = sys.argv[1:]
open(words[words.index("--export") + 1], "w").write("a report")
print(words[words.index("--kernel-name") + 1], words[words.index("--launch-count") + 1], "tiled_torch" in words)
"""


def ncu(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "ncu"
    script.write_text(text.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_one_launch_of_dgated_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu(tmp_path, GOOD, monkeypatch)
    assert profile(tmp_path / "out")
    assert (tmp_path / "out" / "gpu-dgated.ncu-rep").read_text() == "a report"
    assert (tmp_path / "out" / "gpu-dgated.log").read_text() == "regex:dgated 1 True\n"


def test_without_ncu_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "profile: ncu is not on PATH, so dgated is not profiled\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_one_that_fails_or_hangs_is_told_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ncu(tmp_path, "#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n", monkeypatch)
    assert main(["--out", str(tmp_path)]) == 0
    assert "ncu left no report (exit status 1)" in capfd.readouterr().out
    assert "ERR_NVGPUCTRPERM" in (tmp_path / "gpu-dgated.log").read_text()
    ncu(tmp_path, "#!/bin/sh\nsleep 600\n", monkeypatch)
    start = time.monotonic()
    assert not profile(tmp_path, seconds=1.0)
    assert "ncu left no report (exit status 124)" in capfd.readouterr().out
    assert time.monotonic() - start < 60

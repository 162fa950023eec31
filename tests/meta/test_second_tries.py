"""Tests that start processes have a second try, which the closing lines name; others have one."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_tries import FIXTURES, MARKER, STARTERS, starts_processes

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.second_tries import add_second_tries

def pytest_collection_modifyitems(config, items):
    add_second_tries(config, items)
"""
TESTS = """
import pytest
{first}
tries = []

{mark}
def test_fails_once():
    tries.append(1)
    assert len(tries) == 2

{mark}
def test_fails_always():
    assert False
"""


@pytest.mark.deep
def test_only_what_starts_processes_is_tried_again_and_named(tmp_path):
    mark = f"@pytest.mark.{MARKER}"
    for name, first, marked in (("plain", "", ""), ("process", "import subprocess", ""), ("devices", "", mark)):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(first=first, mark=marked))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n  {MARKER}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-raR",
        "--color=no",
        "--tb=no",
    ]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    named = {word: set(re.findall(rf"^{word} test_(\w+\.py::\w+)", said, re.MULTILINE)) for word in ("RERUN", "FAILED")}
    assert named == {
        "RERUN": {f"{file}.py::test_fails_{when}" for file in ("devices", "process") for when in ("always", "once")},
        "FAILED": {f"{file}.py::test_fails_always" for file in ("devices", "plain", "process")}
        | {"plain.py::test_fails_once"},
    }
    assert re.search(r"4 failed, 2 passed, 4 rerun in", said)


def test_this_file_starts_processes_and_every_starter_is_there(request):
    assert starts_processes(request.node)
    for name in STARTERS:
        importlib.import_module(name)


@pytest.mark.parametrize("fixture", sorted(FIXTURES))
def test_the_fixtures_are_there(request, fixture):
    assert request.session._fixturemanager.getfixturedefs(fixture, request.node)

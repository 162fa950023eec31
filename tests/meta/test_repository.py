"""Every file keeps to the rules of repository_rules.py, and the files that make the repository work are in order."""

import os
import re
import runpy
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.meta.repository_rules import docstring_fault, text_faults, tolerance_faults, wording_faults

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared_specs", "tiled_torch", "tiled_jax", "tests", "benchmarks", "docs", "examples", "requirements", ".ci")
GENERATED = {"__pycache__", ".pytest_cache", ".hypothesis", ".git"}  # .git: of a worktree, a file
BINARY = {".png", ".safetensors", ".gguf", ".npz"}
# The license is quoted, not written here; the rules have to name what they forbid in their own specimens.
QUOTING = {"LICENSE", "tests/meta/test_repository.py"}


def files() -> list[str]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [path.relative_to(ROOT) for path in (*inside, *ROOT.iterdir()) if path.is_file()]
    kept = [path for path in found if GENERATED.isdisjoint(path.parts) and path.suffix not in BINARY | {".pyc"}]
    return sorted({path.as_posix() for path in kept})


FILES = files()
MODULES = [path for path in FILES if path.endswith(".py")]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def test_the_lists_are_not_empty():
    assert {"Makefile", "LICENSE", ".ci/run", "shared_specs/shards.py"} <= set(FILES)


def faults(paths: Iterable[str], of: Callable[[str], Any]) -> dict[str, Any]:
    return {path: found for path in paths if (found := of(read(path)))}


def test_every_module_says_what_it_is():
    assert faults(MODULES, docstring_fault) == {}


def test_no_file_names_a_machine_or_leaves_loose_ends():
    assert faults((path for path in FILES if path not in QUOTING), text_faults) == {}


def test_tolerance_numbers_live_in_one_file():
    assert faults((path for path in MODULES if path != "shared_specs/tolerances.py"), tolerance_faults) == {}


def test_docstrings_say_what_is_returned_and_raised():
    library = (path for path in MODULES if path.startswith(("shared_specs/", "tiled_torch/", "tiled_jax/")))
    assert faults(library, wording_faults) == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """What f computes."""', 1),
        ('class C:\n    """What a call needs."""', 1),
        ('class C:\n    def f(self):\n        """What f computes."""', 1),
        ("def check_x(x): ...", 1),
        ('def check_x(x):\n    """What x must be."""', 2),
        ('def check_x(x):\n    """Check x.\n\n    Raises:\n        SpecError: it is wrong.\n    """', 0),
        ('def _check_x(x):\n    """What x must be."""', 0),
        ('def f():\n    """Return whatever comes."""', 0),
    ],
)
def test_a_docstring_that_says_too_little_is_found(source, count):
    assert len(wording_faults(source)) == count


@pytest.mark.parametrize("source", ["", "import math", '"""Module."""\nimport math'])
def test_a_missing_docstring_is_found(source):
    assert docstring_fault(source)


@pytest.mark.parametrize(
    "line",
    ["open('/tmp/x')", "cd /work/main", "see /root", "--index-url somewhere", "# TODO later", "# -------- part two"],
)
def test_a_bad_line_is_found(line):
    assert len(text_faults(f"first\n{line}\n")) == 1


@pytest.mark.parametrize("line", ["a/work/b", "the /workload", "# TODO https://example.org/7", "x = {}/tmp", "# --- a"])
def test_a_good_line_passes(line):
    assert text_faults(line) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.testing.assert_close(a, b, rtol=1e-3, atol=0)",
        "np.testing.assert_allclose(a, b, 1e-3)",
        "assert a == pytest.approx(b, 1e-3)",
        "assert a == pytest.approx(b, rel=1e-3)",
        "torch.testing.assert_close(a, b)",
        "np.testing.assert_allclose(a, b, err_msg='c')",
        "assert jnp.allclose(a, b)",
        "assert a == pytest.approx(b)",
        "assert error < 1e-6",
        "assert 1e-6 > error",
        "def compare(a, b, atol=1e-6): ...",
        "def compare(a, b, *, rtol=1e-6): ...",
    ],
)
def test_a_tolerance_is_found(source):
    assert len(tolerance_faults(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "t.assert_close(a, b, rtol=0, atol=0.0)",
        "t.assert_close(a, b, **exact)",
        "np.testing.assert_allclose(a, b, LIMIT)",
        "assert_close(a, b)",
        "torch.autograd.gradcheck(f, (x,))",
        "assert error < limit",
        "eps = 1e-6",
        "assert keep <= 1.0",
        "f(abs=2)",
    ],
)
def test_what_is_no_tolerance_passes(source):
    assert tolerance_faults(source) == []


def test_properties_have_no_deadline_and_the_same_examples_each_time():
    chosen = hypothesis.settings()
    assert (chosen.deadline, chosen.derandomize) == (None, True)


def test_make_help_lists_every_target():
    phony = set(re.findall(r"^\.PHONY: (\S+)$", read("Makefile"), re.MULTILINE))
    run = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make (\S+) +\S", run.stdout, re.MULTILINE)) == phony
    assert {"env", "demo", "test", "test-new-jax", "check"} <= phony


@pytest.mark.parametrize("path", [".ci/run", ".ci/find-python"])
def test_what_the_makefile_and_ci_start_is_executable(path):
    assert os.access(ROOT / path, os.X_OK)


def test_ci_runs_the_whole_suite_and_needs_both_frameworks():
    ci = runpy.run_path(str(ROOT / ".ci/suites.py"))
    wanted = [
        "lint",
        "types",
        "test",
        "docs",
        "test-figures",
        "test-deep",
        "float8",
        "deepspeed",
        "trainers",
        "aot-triton",
        "test-new-jax",
        "test-new-python",
        "lock",
    ]
    assert [suite.name for suite in ci["SUITES"]] == wanted
    assert ci["ENVIRONMENT"]["TILED_REQUIRE"] == "torch,jax"


def test_find_python_refuses_what_is_not_there():
    run = subprocess.run([ROOT / ".ci/find-python", "3.99"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")

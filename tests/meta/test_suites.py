"""Which suites continuous integration starts, in which order, and what it says of them."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".ci" / "suites.py"
ci = SimpleNamespace(**runpy.run_path(str(FILE)))


def suite(
    name: str, seconds: float = 100, guards: tuple[str, ...] = (), always: bool = False, limit: float = 60
) -> Any:
    return ci.Suite(name, guards, seconds, limit, always)


TEST = suite("test", always=True)
A, B, C = (suite(name, guards=(f"{name}/",)) for name in "abc")


def names(suites: Any) -> list[str]:
    return [one.name for one in suites]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked yet how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def goes(pid: int) -> bool:
    """Whether a process ends within seconds: a signal takes a moment to arrive."""
    deadline = time.monotonic() + 10
    while not (gone := is_gone(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone


@pytest.mark.parametrize(
    ("changed", "commit", "order"),
    [
        ((), "", "test a b c"),
        ((), "0", "test a b c"),
        ((), "a", "test b c a"),
        ((), "b", "test c a b"),
        (("b/x.py",), "0", "test b a c"),
        (("b/x.py",), "1", "test b c a"),
        (("c/d/x.py", "b/x.py"), "1", "test b c a"),
        (("a/x", "b/x", "c/x"), "1", "test a b c"),
        (("bb/x.py",), "1", "test b c a"),
    ],
)
def test_what_changed_comes_first_and_the_commit_chooses_among_the_rest(changed, commit, order):
    assert names(ci.order_of((A, TEST, B, C), set(changed), commit)) == order.split()


@pytest.mark.parametrize(("commit", "order"), [("0", "test b a c"), ("1", "test b c a")])
def test_short_suites_come_first_and_the_commit_chooses_among_the_long_ones(commit, order):
    """Or the longest of what changes every day would never have its turn."""
    long = [suite(name, ci.SHORT + 1, (f"{name}/",)) for name in "ac"]
    assert names(ci.order_of((long[0], TEST, B, long[1]), {"a/x", "b/x", "c/x"}, commit)) == order.split()


@pytest.mark.parametrize(
    ("path", "guard", "found"),
    [
        ("docs/a/b.md", "docs/", True),
        ("README.md", "README.md", True),
        ("docs/README.md", "README.md", False),
        ("x/launch.py", "x/launch*", True),
        ("tests/mlp/test_jax_mlp.py", "tests/*/*jax*", True),
    ],
)
def test_guards_name_files_folders_and_patterns(path, guard, found):
    assert ci.matches(path, guard) is found


def test_a_suite_fits_where_it_would_end_with_the_reserve_left():
    assert ci.fits(A, 2.0, 200 + ci.RESERVE)
    assert not ci.fits(A, 2.0, 199 + ci.RESERVE)


def test_slowness_is_what_the_first_suites_took_and_never_below_1():
    lint = suite("lint", seconds=50, always=True)
    assert ci.slowness_of({}) == ci.slowness_of({TEST: 20}) == ci.slowness_of({A: 500}) == 1
    assert ci.slowness_of({TEST: 250, lint: 50, A: 500}) == 2


def passed_over(minutes: float, slowness: float, *suites: Any) -> list[str]:
    """The closing lines of a pass over suites that are green and take their seconds times slowness, on a made-up clock."""
    now = [0.0]

    def run(one: Any) -> Any:
        now[0] += one.seconds * slowness
        return ci.Ran(0, "fine\n", one.seconds * slowness)

    return ci.closing_lines(ci.one_pass(suites, minutes, run, lambda: now[0]), now[0])


def test_a_slow_machine_leaves_suites_out_and_says_so():
    long = suite("long", seconds=200)
    assert passed_over(10, 1, TEST, long, A)[-1] == "6.7 minutes, green"
    assert passed_over(10, 2.5, TEST, long, A) == [
        "test: fine (250 s)",
        "long: left out: it takes about 500 s here and 350 s of the 10 minutes are left",
        "a: fine (250 s)",
        "8.3 minutes, green, 1 left out",
    ]


def test_where_there_is_no_time_for_all_of_a_suite_a_part_of_it_runs():
    whole = ci.Suite("whole", ("whole/",), 300, 900, part=suite("part", seconds=80))
    assert passed_over(10, 1, TEST, whole)[1:] == ["whole: fine (300 s)", "6.7 minutes, green"]
    assert passed_over(10, 2, TEST, whole)[1:] == [
        "whole: left out: it takes about 600 s here and 400 s of the 10 minutes are left",
        "part: fine (160 s)",
        "6.0 minutes, green, 1 left out",
    ]
    assert passed_over(5, 2, TEST, whole)[1:] == [
        "whole: left out: it takes about 600 s here and 100 s of the 5 minutes are left",
        "3.3 minutes, green, 1 left out",
    ]


def test_what_always_runs_does_so_without_time_and_all_runs_without_a_budget():
    lint = suite("lint", always=True)
    late = "a: left out: it takes about 100 s here and 0 s of the 1 minutes are left"
    assert passed_over(1, 1, TEST, lint, A)[1:3] == ["lint: fine (100 s)", late]
    assert passed_over(ci.minutes_of(["--all"]), 50, TEST, A)[1] == "a: fine (5000 s)"


@pytest.mark.parametrize(
    ("status", "output", "line"),
    [
        (0, "= 1 passed in 1.5s =\n== 712 passed, 52 skipped in 65.12s (0:01:05) ==\nbye\n", "712 passed, 52 skipped in 7 s"),
        (0, "Found 0\nAll checks passed!\n\n", "All checks passed! (7 s)"),
        (0, "", "no output (7 s)"),
        (2, "make: *** Error 1\n", "RED: exit status 2"),
        (2, "=== 1 failed, 3 passed in 2.00s ===\nmake: *** Error 1\n", "RED: exit status 2, 1 failed, 3 passed in 7 s"),
        (-9, "", "RED: ended by signal 9"),
        (None, "=== 1 passed in 2.00s ===\n", "RED: ran over its limit of 60 s"),
        (
            0,
            "RERUN tests/b.py::test_b\nRERUN tests/a.py::test_a[1]\n== 2 passed, 2 rerun in 2.00s ==\n",
            "2 passed, 2 rerun in 7 s, tried twice: tests/a.py::test_a[1], tests/b.py::test_b",
        ),
    ],
)  # fmt: skip
def test_each_suite_has_one_plain_line(status, output, line):
    assert ci.closing_lines([ci.outcome_of(A, ci.Ran(status, output, 7.2))], 7.2)[0] == f"a: {line}"


def whole_pass(capfd: pytest.CaptureFixture[str], commands: dict[str, str], **options: Any) -> tuple[list[Any], str]:
    """A pass over small shell commands: the outcomes, and what was written."""
    suites = [suite(name, seconds=1, **options) for name in commands]
    outcomes = ci.one_pass(suites, 40, lambda one: ci.run_command(["sh", "-c", commands[one.name]], one.limit))
    return outcomes, capfd.readouterr().out


def test_a_red_suite_stops_no_other(capfd, monkeypatch):
    commands = {"test": "echo begun; exit 2", "b": "echo $TILED_REQUIRE $OMP_NUM_THREADS"}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = ci.main(["--all"], (TEST, B), lambda one: ["sh", "-c", commands[one.name]])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert status == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[:5] == ["== make test", "begun", "== make b", "torch,jax 2", ""]
    taken = [re.sub(r"\(\d+ s\)|^\d\.\d(?= minutes)", "N", line) for line in lines[5:]]
    assert taken == ["test: RED: exit status 2", "b: torch,jax 2 N", "N minutes, RED: test"]


def test_a_suite_over_its_limit_is_red_and_its_children_are_gone(capfd):
    (outcome,), written = whole_pass(capfd, {"a": "sleep 600 & echo $!; wait"}, limit=0.5)
    assert (outcome.state, outcome.words) == ("RED", "ran over its limit of 0.5 s")
    assert goes(int(written.splitlines()[0]))


def test_what_a_suite_leaves_running_is_not_waited_for(capfd):
    (outcome,), written = whole_pass(capfd, {"a": "sleep 600 & echo $!"})
    assert outcome.state == "green"
    assert goes(int(written))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs(number):
    program = (
        f"import runpy; ci = runpy.run_path({str(FILE)!r}); one = ci['Suite']('a', (), 1, 60); "
        "ci['main'](['--all'], (one,), lambda _: ['sh', '-c', 'sleep 600 & echo $!; wait'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "== make a\n"
        child = int(process.stdout.readline())
        os.kill(process.pid, number)
        assert process.wait(30) == 128 + number
    assert goes(child)


def test_what_changed_is_counted_from_the_date_of_the_commit():
    asked: list[tuple[str, ...]] = []

    def git(*arguments: str) -> str:
        asked.append(arguments)
        return "abc 1000000000" if "-1" in arguments else "a/x.py\n\nb/y.py\na/x.py"

    assert ci.changed_since(3, git) == ("abc", {"a/x.py", "b/y.py"})
    assert f"--since={1000000000 - 3 * 86400}" in asked[1]
    assert ci.changed_since(3, lambda *_: "") == ("", set())


@pytest.mark.parametrize("minutes", ["soon", "0", "-1", "nan"])
def test_a_budget_that_is_no_number_is_refused(minutes, monkeypatch, capsys):
    monkeypatch.setenv("TILED_CI_MINUTES", minutes)
    with pytest.raises(SystemExit):
        ci.minutes_of([])
    assert f"TILED_CI_MINUTES must be a number of minutes > 0, got '{minutes}'" in capsys.readouterr().err


def test_environments_that_have_to_be_made_have_ten_minutes(tmp_path, monkeypatch):
    monkeypatch.delenv("TILED_CI_MINUTES", raising=False)
    installed = tmp_path / ".installed"
    assert ci.minutes_of([], installed) == 40
    installed.touch()
    assert ci.minutes_of([], installed) == 30
    monkeypatch.setenv("TILED_CI_MINUTES", "7")
    assert ci.minutes_of([], installed) == 7


def test_every_suite_is_a_target_and_its_limit_is_generous():
    phony = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in phony for target in line.split()}
    suites = list(dict.fromkeys(one for suite in ci.SUITES for one in (suite, suite.part, *suite.turns) if one))
    assert set(names(suites)) - targets == set()
    assert len(set(names(suites))) == len(suites)
    assert [one.name for one in suites if one.limit < 3 * one.seconds] == []


def test_a_part_has_nothing_that_the_whole_has_not():
    database = subprocess.run(["make", "-pq"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    whole, part = (
        re.findall(rf"^{name} := (.*)$", database, re.MULTILINE)[0].split() for name in ("NEW_JAX", "NEW_JAX_PART")
    )
    assert [name for name in part if not (ROOT / name).exists()] == []
    assert [name for name in part if not any(name == one or name.startswith(f"{one}/") for one in whole)] == []
    assert len(set(part)) > 20


def of_make(*variables: str) -> list[list[str]]:
    """What variables of the Makefile hold."""
    line = "ask: ; @:\n" + "".join(f"$(info $({name}))\n" for name in variables)
    command = ["make", "--no-print-directory", "-s", "-f", "Makefile", "-f", "-", "ask"]
    said = subprocess.run(command, cwd=ROOT, input=line, capture_output=True, text=True, check=True).stdout
    return [found.split() for found in said.splitlines()]


def test_the_jax_half_in_full_and_in_part_are_the_same_with_both_sets_of_versions():
    full, part, rest = of_make("NEW_JAX", "NEW_JAX_PART", "JAX_ALIKE")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_jax_*.py")}

    def among(names: list[str]) -> set[str]:
        return {file for file in files if any(file == name or file.startswith(f"{name}/") for name in names)}

    assert files - among(full) == set()
    assert among(part) | set(rest) == files
    assert among(part) & set(rest) == set()
    assert len(rest) > 40
    assert len(among(part)) > 20


@pytest.mark.parametrize(
    ("commit", "order"),
    [("", "test new-part deep-0"), ("1", "test new-part deep-0"), ("2", "part new deep-1"), ("b", "part new deep-1")],
)
def test_the_commit_chooses_the_versions_with_the_whole_jax_half_and_the_deep_tests(commit, order):
    test = ci.Suite("test", (), 100, 900, turns=(None, suite("part")))
    new = ci.Suite("new", (), 100, 900, turns=(suite("new-part"), None))
    deep = ci.Suite("deep", (), 100, 900, turns=(suite("deep-0"), suite("deep-1")))
    assert " ".join(names(ci.of_turn([test, new, deep], commit))) == order


@pytest.mark.parametrize("commit", ["0", "2"])
def test_at_every_commit_one_set_of_versions_runs_the_whole_jax_half(commit):
    found = {*names(ci.of_turn(ci.SUITES, commit))}
    assert len({"test", "test-new-jax"} & found) == 1
    assert len({"test-part", "test-new-jax-part"} & found) == 1


@pytest.mark.deep
def test_the_halves_of_the_deep_tests_are_all_of_them():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:xdist",
        "-m",
        "deep and not slow",
        "tests/app",
    ]

    def tests(half: str) -> set[str]:
        settings = os.environ | {"TILED_DEEP_HALF": half, "TILED_TESTS": "spec"}
        said = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout
        return {line for line in said.splitlines() if "::" in line}

    first, second = tests("0"), tests("1")
    assert first | second == tests("")
    assert not first & second
    assert first
    assert second


def test_every_guard_names_something():
    guards = {guard for one in ci.SUITES for guard in one.guards}
    assert [guard for guard in guards if not any(ROOT.glob(guard))] == []
    assert [one.name for one in ci.SUITES if not one.guards and not one.always] == []

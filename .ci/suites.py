"""The suites of continuous integration, and which of them run within its budget of time. Started by .ci/run.

The suites marked `always` come first, then those whose files changed in the last days, short ones before long ones, then the
others. Among the long ones and among the others the commit chooses whose turn it is. Of what would not end within the budget a
part runs, where it has one, or it is left out, and either is named; nothing that was started is cut off.

The commit also chooses which set of versions runs the JAX half in full, that of `test` or that of `test-new-jax`. The other
runs the part that is known to differ between versions. And the commit chooses which half of the deep tests runs.
"""

import argparse
import fnmatch
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NoReturn, cast

ROOT = Path(__file__).resolve().parents[1]
# The budget where the environments have to be made, and where they are there.
MINUTES, MINUTES_INSTALLED = 40.0, 30.0
INSTALLED = ROOT / ".venv/.installed"
DAYS = 3
# Seconds kept back for the closing lines and for a suite that takes somewhat longer than last time.
RESERVE = 20.0
# A suite of so many seconds comes before longer ones, so that these do not keep it out.
SHORT = 100.0
# Seconds that a suite has to end by itself once it is told to.
GRACE = 10.0
# A framework that cannot be imported is a failure here, never a skip.
ENVIRONMENT = {"CI": "true", "TILED_REQUIRE": "torch,jax", "PYTEST_ADDOPTS": "--color=no"}
DEFAULTS = {"OMP_NUM_THREADS": "2"}
PYTEST_SUMMARY = re.compile(
    r"^=+ (.*\d+ (?:passed|failed|error|skipped).*?)(?: in [\d.]+s(?: \([\d:]+\))?)? =+\s*$", re.MULTILINE
)
# A test that failed at first and was run again: see tests/second_tries.py.
SECOND_TRY = re.compile(r"^RERUN (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """A target of the Makefile that continuous integration runs.

    guards: what it is there for: files, folders that end in "/", or patterns in which "*" stands for slashes too.
    seconds: what it took last on a machine with two cores, its environment included.
    limit: seconds after which it is ended and counts as failed.
    part: the suite of what matters most in it, which runs in its place where there is no time for all of it.
    turns: what runs in its place at one half of all commits and at the other half; where there is nothing, it does.
    """

    name: str
    guards: tuple[str, ...]
    seconds: float
    limit: float
    always: bool = False
    part: "Suite | None" = None
    turns: "tuple[Suite | None, Suite | None]" = (None, None)


HALVES = ("tiled_torch/", "tiled_jax/", "shared_specs/")

NEW_JAX_PART = Suite("test-new-jax-part", (), 200, 1800)

# The most important first.
SUITES = (
    Suite("lint", (), 80, 1200, always=True),
    Suite("types", (), 55, 900, always=True),
    Suite("test", (), 490, 2700, always=True, turns=(None, Suite("test-part", (), 350, 2700, always=True))),
    Suite("docs", ("docs/", "mkdocs.yml", "README.md", "requirements/docs.txt", *HALVES), 20, 600),
    Suite("test-figures", (*HALVES, "tests/"), 100, 900),
    Suite(
        "test-deep",
        (*HALVES, "tests/"),
        940,
        3000,
        turns=(Suite("test-deep-0", (), 490, 1800), Suite("test-deep-1", (), 490, 1800)),
    ),
    Suite("float8", ("tiled_torch/plans/", "tiled_torch/layers/", "tests/float8/", "requirements/float8.txt"), 25, 600),
    Suite("deepspeed", ("tiled_torch/", "tests/zero/", "requirements/deepspeed.txt"), 80, 900),
    Suite(
        "trainers",
        (
            "tiled_torch/models/",
            "tiled_torch/plans/",
            "tiled_torch/compat/",
            "tests/trainers/",
            "tests/habits/",
            "requirements/trainers.txt",
        ),
        60,
        1200,
    ),
    Suite(
        "aot-triton",
        (
            "tiled_torch/mlp/kernels/",
            "tiled_torch/loss/kernels/",
            "tiled_torch/core/launch*",
            "shared_specs/kernels/",
            "requirements/aot-triton.txt",
            "tests/kernels/*torch_aot*",
        ),
        125,
        1800,
    ),
    Suite(
        "test-new-jax",
        ("tiled_jax/", "shared_specs/", "requirements/new-jax.txt", "tests/*/*jax*"),
        360,
        3600,
        part=NEW_JAX_PART,
        turns=(NEW_JAX_PART, None),
    ),
    Suite("test-new-python", ("requirements/new-jax.txt", "pyproject.toml", "setup.py"), 90, 1200),
    Suite("lock", ("requirements/", "pyproject.toml"), 25, 600),
)


@dataclass(frozen=True)
class Ran:
    """What came of a suite that was started: its exit status (None where it was ended at its limit), output and seconds."""

    status: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What the closing lines say of a suite."""

    name: str
    state: Literal["green", "RED", "left out"]
    words: str


def matches(path: str, guard: str) -> bool:
    """Whether a file is what the guard names."""
    return path.startswith(guard) if guard.endswith("/") else fnmatch.fnmatchcase(path, guard)


def order_of(suites: Sequence[Suite], changed: Collection[str], commit: str) -> list[Suite]:
    """Return the suites in the order they are started in: always, of what changed, then in the commit's turn."""
    always = [suite for suite in suites if suite.always]
    others = [suite for suite in suites if not suite.always]
    of_changes = [suite for suite in others if any(matches(path, guard) for path in changed for guard in suite.guards)]
    short = [suite for suite in of_changes if suite.seconds <= SHORT]
    long = [suite for suite in of_changes if suite not in short]
    rest = [suite for suite in others if suite not in of_changes]
    return always + short + turned(long, commit) + turned(rest, commit)


def of_turn(suites: Sequence[Suite], commit: str) -> list[Suite]:
    """Return what runs in the place of each suite at this commit."""
    turn = int(commit or "0", 16) // 2 % 2
    return [suite.turns[turn] or suite for suite in suites]


def turned(suites: Sequence[Suite], commit: str) -> list[Suite]:
    """Return the suites from the one on whose turn it is."""
    turn = int(commit or "0", 16) % len(suites) if suites else 0
    return [*suites[turn:], *suites[:turn]]


def slowness_of(taken: Mapping[Suite, float]) -> float:
    """Return how many times slower than expected the suites were that say so, at least 1."""
    measured = {suite: seconds for suite, seconds in taken.items() if suite.always}
    return max(1.0, sum(measured.values()) / (sum(suite.seconds for suite in measured) or math.inf))


def fits(suite: Suite, slowness: float, left: float) -> bool:
    """Whether a suite would end within the seconds left."""
    return suite.seconds * slowness + RESERVE <= left


def summary_of(output: str) -> tuple[str, bool]:
    """Return the last line in which pytest counts, without its time, else the last line; and whether pytest counted."""
    if counted := PYTEST_SUMMARY.findall(output):
        return counted[-1], True
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output"), False


def outcome_of(suite: Suite, ran: Ran) -> Outcome:
    """Return what is said of a suite that was started."""
    summary, counted = summary_of(ran.output)
    summary = f"{summary} in {ran.seconds:.0f} s" if counted else f"{summary} ({ran.seconds:.0f} s)"
    if again := sorted(set(SECOND_TRY.findall(ran.output))):
        summary += f", tried twice: {', '.join(again)}"
    if ran.status == 0:
        return Outcome(suite.name, "green", summary)
    if ran.status is None:
        return Outcome(suite.name, "RED", f"ran over its limit of {suite.limit:g} s")
    fault = f"exit status {ran.status}" if ran.status > 0 else f"ended by signal {-ran.status}"
    return Outcome(suite.name, "RED", f"{fault}, {summary}" if counted else fault)


def left_out(suite: Suite, slowness: float, left: float, minutes: float) -> Outcome:
    """Return what is said of a suite that is not started."""
    words = (
        f"it takes about {suite.seconds * slowness:.0f} s here and "
        f"{max(left, 0.0):.0f} s of the {minutes:g} minutes are left"
    )
    return Outcome(suite.name, "left out", words)


def one_pass(
    order: Iterable[Suite],
    minutes: float,
    run: Callable[[Suite], Ran],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the suites in this order as far as the minutes go, whatever fails."""
    start = clock()
    taken: dict[Suite, float] = {}
    outcomes: list[Outcome] = []
    for suite in order:
        left, slowness = 60 * minutes - (clock() - start), slowness_of(taken)
        chosen = next((one for one in (suite, suite.part) if one and (one.always or fits(one, slowness, left))), None)
        if chosen is not suite:
            outcomes.append(left_out(suite, slowness, left, minutes))
        if chosen:
            ran = run(chosen)
            taken[chosen] = ran.seconds
            outcomes.append(outcome_of(chosen, ran))
    return outcomes


def closing_lines(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """Return one plain line for each suite, and the verdict."""
    lines = [f"{one.name}: {'' if one.state == 'green' else one.state + ': '}{one.words}" for one in outcomes]
    red = [one.name for one in outcomes if one.state == "RED"]
    absent = sum(one.state == "left out" for one in outcomes)
    verdict = f"RED: {', '.join(red)}" if red else "green"
    return [*lines, f"{seconds / 60:.1f} minutes, {verdict}{f', {absent} left out' if absent else ''}"]


def git(*arguments: str) -> str:
    """What git says, or nothing where there is no git or no history."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def changed_since(days: float, git: Callable[..., str] = git) -> tuple[str, set[str]]:
    """Return the commit and the files changed in its history's last days, counted from the commit's own date."""
    commit, _, date = git("log", "-1", "--format=%H %ct").partition(" ")
    if not commit:
        return "", set()
    since = int(date) - int(days * 86400)
    # The first commit, or the last that a shallow clone has, names every file and changed none.
    log = ("-c", "core.quotePath=false", "log", f"--since={since}", "--min-parents=1")
    names = git(*log, "--no-renames", "--name-only", "--format=")
    return commit, {line for line in names.splitlines() if line}


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and all that it started, as far as they are there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: asked first, then by force."""
    try:
        signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()


def chunks(process: subprocess.Popen[bytes], deadline: float) -> Iterable[bytes]:
    """Yield what a process writes as it comes, until it ends, or TimeoutExpired at the deadline."""
    pipe = cast(IO[bytes], process.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            # Asked before reading, so that its last words are read; what it left running may hold the pipe open.
            ended = process.poll() is not None
            if selector.select(0 if ended else min(left, 0.5)):
                if not (chunk := os.read(pipe.fileno(), 1 << 16)):
                    break
                yield chunk
            elif ended:
                break
    process.wait(max(0.0, deadline - time.monotonic()))


def run_command(command: Sequence[str], limit: float) -> Ran:
    """Run a command in a process group of its own, at most for its limit, and show what it writes as it comes."""
    start, written = time.monotonic(), bytearray()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=DEFAULTS | dict(os.environ) | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    status = None
    try:
        for chunk in chunks(process, start + limit):
            written += chunk
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
        status = process.returncode
    except subprocess.TimeoutExpired:
        print(f"\n{' '.join(command)}: ran over its limit of {limit:g} s", flush=True)
    finally:
        end(process)
        cast(IO[bytes], process.stdout).close()
    return Ran(status, written.decode(errors="replace"), time.monotonic() - start)


def make(suite: Suite) -> list[str]:
    """Return the command of a suite."""
    return ["make", suite.name]


def stop(number: int, _: object) -> NoReturn:
    """End everything in order where this program is told to."""
    raise SystemExit(128 + number)


def minutes_of(arguments: Sequence[str], installed: Path = INSTALLED) -> float:
    """Return the budget that the command line and the environment ask for, else by what is installed."""
    parser = argparse.ArgumentParser(prog=".ci/run", description="Run the suites that the budget has time for.")
    parser.add_argument("--all", action="store_true", help="every suite, however long it takes")
    if parser.parse_args(arguments).all:
        return math.inf
    given = os.environ.get("TILED_CI_MINUTES") or str(MINUTES_INSTALLED if installed.exists() else MINUTES)
    try:
        minutes = float(given)
    except ValueError:
        minutes = math.nan
    if not minutes > 0:
        parser.error(f"TILED_CI_MINUTES must be a number of minutes > 0, got {given!r}")
    return minutes


def main(
    arguments: Sequence[str],
    suites: Sequence[Suite] = SUITES,
    command_of: Callable[[Suite], Sequence[str]] = make,
) -> int:
    """Run what the budget has time for, and return the exit status."""
    minutes = minutes_of(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    def run(suite: Suite) -> Ran:
        print(f"== make {suite.name}", flush=True)
        return run_command(command_of(suite), suite.limit)

    start = time.monotonic()
    commit, changed = changed_since(DAYS)
    order = order_of(suites, changed, commit)
    outcomes = one_pass(order if math.isinf(minutes) else of_turn(order, commit), minutes, run)
    print("\n".join(["", *closing_lines(outcomes, time.monotonic() - start)]), flush=True)
    return int(any(outcome.state == "RED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

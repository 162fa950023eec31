"""`python -m tests.mutants.run [-k words] [--jobs n]`: breaks a copy of the tree in every known way; the tests must notice.

Each job has a copy of its own and applies one mutant at a time. First the tests of all mutants run once on an unbroken
copy, so that none counts as caught by tests that fail anyway. "caught, deep" is by a test of `make test-deep`. Exit status 1
where a mutant survived or could not be tried.
"""

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.told import DEEP

ROOT = Path(__file__).parents[2]
SECONDS = 600.0
# What a mutant's tests are run by: an interpreter, packages before its own, settings.
ENVIRONMENTS: dict[str, tuple[Path, Path | None, dict[str, str]]] = {
    "main": (Path(sys.executable), None, {"TILED_REQUIRE": "torch,jax"}),
    "new-jax": (
        ROOT / ".venv-new-jax" / "bin" / "python",
        None,
        {"TILED_REQUIRE": "jax", "TILED_OPTIMIZE": "1", "TILED_TESTS": "spec,jax"},
    ),
    "deepspeed": (Path(sys.executable), ROOT / ".venv-deepspeed", {"TILED_REQUIRE": "torch", "TILED_ZERO": "1"}),
}


class Tried(NamedTuple):
    mutant: Mutant
    verdict: str  # "caught", "caught, deep" by a deep test, "survived" or why it could not be tried
    seconds: float


def copied(folder: Path) -> Path:
    """A copy of what git has or could have."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def pytest(folder: Path, arguments: str, by: str) -> tuple[int, str]:
    """Exit status and closing lines of pytest in a copy; 124 where it took too long."""
    python, packages, settings = ENVIRONMENTS[by]
    path = os.pathsep.join(str(each) for each in (folder, packages) if each)
    settings = settings | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:rerunfailures",
        "-p",
        "tests.mutants.told",
    ]
    command += ["-m", "not slow and not gpu", *shlex.split(arguments)]  # what is named may be deep
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done after {SECONDS:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, "\n".join(lines[-15:])


def broken(mutant: Mutant, text: str) -> str:
    """The text of its file as the mutant makes it; ValueError where it does not apply."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.path} has its text {text.count(mutant.old)} times")
    return text.replace(mutant.old, mutant.new)


def tried(mutant: Mutant, folder: Path, passing: bool) -> Tried:
    start, file = time.monotonic(), folder / mutant.path
    text = file.read_text()
    try:
        file.write_text(broken(mutant, text))
        status, said = pytest(folder, mutant.tests, mutant.by)
    except ValueError as error:
        status, said = 2, str(error)
    finally:
        file.write_text(text)
    noticed = "caught, deep" if DEEP in said.splitlines() else "caught"
    verdict = {0: "survived", 1: noticed}.get(status, f"not tried: {said}")
    if verdict == noticed and not passing:
        verdict = "not tried: its tests fail without it"
    return Tried(mutant, verdict, time.monotonic() - start)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("-k", dest="words", default="", help="only mutants whose name or path has these words")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args(given)
    chosen = [m for m in MUTANTS if options.words in m.name or options.words in m.path]
    if not chosen:
        print(f"mutants: no name or path has {options.words!r}", file=sys.stderr)
        return 2
    for by in sorted({mutant.by for mutant in chosen}):
        python, packages, _ = ENVIRONMENTS[by]
        if not (packages or python).exists():
            print(f"mutants: some need .venv-{by}; make {by.replace('new', 'test-new')} creates it", file=sys.stderr)
            return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        found = run_all(chosen, Path(scratch), options.jobs)
    survived = [each for each in found if not each.verdict.startswith("caught")]
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(found) - len(survived)} caught, {len(survived)} not, of {len(found)} mutants in {minutes:.1f} min")
    return 1 if survived else 0


def run_all(chosen: list[Mutant], scratch: Path, jobs: int) -> list[Tried]:
    """Every mutant's verdict, printed as it comes."""
    suites = list(dict.fromkeys((mutant.tests, mutant.by) for mutant in chosen))
    work: queue.SimpleQueue[object] = queue.SimpleQueue()
    passing: dict[tuple[str, str], bool] = {}
    found: list[Tried] = []
    lock = threading.Lock()

    def each(folder: Path) -> None:
        while not work.empty():
            try:
                item = work.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Mutant):
                result = tried(item, folder, passing[item.tests, item.by])
                with lock:
                    found.append(result)
                    print(f"{result.verdict:12} {result.seconds:5.0f} s  {item.name}", flush=True)
            else:
                tests, by = item  # type: ignore[misc]
                status, said = pytest(folder, tests, by)
                passing[tests, by] = status == 0
                if status:
                    print(f"unbroken, exit status {status}: {tests}\n{said}", flush=True)

    folders = [copied(scratch / f"copy{number}") for number in range(jobs)]
    for items in (suites, chosen):
        for item in items:
            work.put(item)
        threads = [threading.Thread(target=each, args=(folder,)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

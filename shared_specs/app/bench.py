"""The framework-free body of `bench`: gate on the parity tests, time variants interleaved, print, record."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from shared_specs.cli import InputError
from shared_specs.workloads import LOSS_WORKLOADS, MLP_WORKLOADS, LossWorkload, MLPWorkload

ROOT = Path(__file__).parents[2]


def chosen_workloads(name: str | None) -> list[MLPWorkload]:
    return [workload for workload in MLP_WORKLOADS if name in (None, workload.name)]


def chosen_loss_workloads(name: str | None) -> list[LossWorkload]:
    return [workload for workload in LOSS_WORKLOADS if name in (None, workload.name)]


def require_parity(half: str, op: str = "mlp") -> str:
    """Runs the op's parity tests of one half; InputError unless they are green. Returns pytest's closing line."""
    tests = ROOT / "tests" / "parity" / f"test_{op}.py"
    if not tests.exists():
        raise InputError("bench: the parity tests must be there, got none. Run it from a checkout of the repository.")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tests),
        "-k",
        f"(test_case and {half}) or collected",
    ]
    # The tests' own programs are compiled without LLVM's optimizations (tests/conftest.py); those that are timed are not.
    env = {**os.environ, "TILED_REQUIRE": half, "TILED_OPTIMIZE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    closing = lines[-1].strip("= ")
    if done.returncode:
        raise InputError(f"bench: the parity tests must pass before anything is timed, got: {closing}")
    return closing


def host_seconds(run: Callable[[], object]) -> float:
    """Seconds of one run by the host's clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleave(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[Callable[[], object]], float] = host_seconds,
    *,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Seconds of every variant, `repeats` times in turn, so that drift hits all alike. Each is run once before, unless warm."""
    for run in () if warm else variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(clock(variants[name]))
    return seconds


def summarise(seconds: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, Any]]:
    """Per variant: median, least and largest seconds, and the median over turns of the ratio to the reference."""
    return {
        name: {
            "median_seconds": statistics.median(times),
            "least_seconds": min(times),
            "largest_seconds": max(times),
            f"ratio_to_{reference}": statistics.median(
                [mine / theirs for mine, theirs in zip(times, seconds[reference], strict=True)]
            ),
            f"least_ratio_to_{reference}": min(times) / min(seconds[reference]),
        }
        for name, times in seconds.items()
    }


def show(title: str, summary: Mapping[str, Mapping[str, Any]], reference: str) -> None:
    table = Table("variant", "median s", "least s", f"x {reference} (median)", f"x {reference} (least)", title=title)
    for name, row in summary.items():
        numbers = (row["median_seconds"], row["least_seconds"])
        ratios = (row[f"ratio_to_{reference}"], row[f"least_ratio_to_{reference}"])
        table.add_row(name, *(f"{number:.3f}" for number in (*numbers, *ratios)))
    Console().print(table)


def mlp_workloads(tokens: tuple[int, ...], shards: tuple[int, ...]) -> list[tuple[int, int]]:
    """(tokens, tokens of a shard): the longest context first, then every shard length at the second, then the others."""
    default = shards[-2]
    sweep = [(tokens[1], shard) for shard in shards if shard <= tokens[1]]
    return [(tokens[-1], default), *sweep, *((total, default) for total in tokens[:-1] if total != tokens[1])]


class Deadline:
    """When a part of `make gpu` begins no more workloads: a machine that is lent is taken back at its own hour."""

    def __init__(self, minutes: float | None) -> None:
        self.minutes = 4.0 if minutes is None else minutes
        self.end = time.monotonic() + 60 * self.minutes

    def leaves_out(self, workload: object) -> bool:
        """Whether it is over; then says which workload is left out."""
        over = time.monotonic() >= self.end
        if over:
            print(f"{workload}: left out: the {self.minutes:g} minutes of --minutes are over", flush=True)
        return over


class Clock(Protocol):
    """What measures one run on a device."""

    def seconds(self, run: Callable[[], object]) -> float: ...

    def peak(self, run: Callable[[], object]) -> int | None:
        """Runs it once and returns the most bytes that it had beyond those that were there; None where nobody counts."""
        ...

    def after_failure(self) -> None: ...


def measured(
    runs: Mapping[str, Callable[[], object]], repeats: int, clock: Clock, flop: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One line a variant, interleaved: seconds, ratio to the first that runs, TFLOP/s, peak bytes; or why it did not run."""
    left_out: list[dict[str, Any]] = []
    alive: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int | None] = {}
    for name, run in runs.items():
        try:
            run()  # compiles
            peaks[name] = clock.peak(run)
            alive[name] = run
        except Exception as error:  # out of memory, a peer's own refusal: a line in the record
            left_out.append({"variant": name, "left_out": f"{type(error).__name__}: {str(error)[:200]}"})
            clock.after_failure()
    if not alive:
        return left_out
    reference = next(iter(alive))
    summary = summarise(interleave(alive, repeats, clock.seconds, warm=True), reference)
    show("", summary, reference)
    lines = [
        {
            "variant": name,
            "peak_bytes": peaks[name],
            "tflops": flop[name] / row["median_seconds"] / 1e12 if name in flop else None,
            **row,
        }
        for name, row in summary.items()
    ]
    return lines + left_out

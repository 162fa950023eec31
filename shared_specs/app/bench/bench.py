"""The framework-free body of `bench`: gate on the parity tests, time variants interleaved, print, record."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_specs.app.bench.workloads import LOSS_WORKLOADS, MLP_WORKLOADS, LossWorkload, MLPWorkload
from shared_specs.app.options import InputError

ROOT = Path(__file__).parents[3]


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
    """Return seconds of one run by the host's clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleave(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return seconds of every variant, `repeats` times in turn, so that drift hits all alike. Each is run once before."""
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(host_seconds(variants[name]))
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

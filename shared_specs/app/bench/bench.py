"""The framework-free body of `bench`: gate on the parity tests, time variants interleaved, print, record."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import WORKLOADS, Workload
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.core.rounding import relative_error
from shared_specs.mlp.costs import MLPShape, saved_bytes
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import BENCH_GRADIENTS

ROOT = Path(__file__).parents[3]


Array = np.ndarray[Any, Any]
Rows = list[dict[str, Any]]
TILED = {"tiled": 0.0, "tiled-keep-0.5": 0.5, "tiled-keep-1": 1.0}  # variant of an MLP -> keep


class Op(Protocol):
    """A module of a half that measures one operation."""

    @property
    def PACKAGES(self) -> tuple[str, ...]:
        """Return those whose versions matter."""
        ...

    def measure(self, workload: Any, repeats: int) -> Rows:
        """Return one result a variant."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what else a reader of the record has to know."""
        ...


def run_bench(options: BenchOptions, half: str, ops: Mapping[str, Op]) -> int:
    """Measure one operation, its parity tests first: a table a workload and a record. Return 0. ops: by `--op`."""
    op = ops[options.op]
    parity = require_parity(half, "loss" if options.op in ("loss", "model") else "mlp")
    print(f"parity: {parity}", flush=True)
    chosen = [workload for workload in WORKLOADS[options.op] if options.workload in (None, workload.name)]
    results = [row for workload in chosen for row in op.measure(workload, options.turns)]
    record = make_record(options.op, f"tiled_{half}", op.PACKAGES, results, parity=parity, **op.facts())
    print(f"record: {write_record(options.out, record)}")
    return 0


def check_results(results: Iterable[tuple[str, Mapping[str, Array | None]]]) -> None:
    """Refuse a variant that does not compute what the first one does: a benchmark of something else is worth nothing.

    Args:
        results: name and quantities of each variant; None for a gradient that it does not have.
    Raises:
        RuntimeError: a quantity is missing or another one.
    """
    expected: Mapping[str, Array | None] = {}
    for name, found in results:
        expected = expected or found
        for quantity, theirs in expected.items():
            mine = found[quantity]
            if mine is None or theirs is None or not relative_error(mine, theirs) <= BENCH_GRADIENTS:
                raise RuntimeError(f"bench: {name} does not compute the plain {quantity}")


def predicted_bytes(shape: MLPShape, plan: ShardPlan, peak: Callable[[MLPShape, ShardPlan], int]) -> dict[str, int]:
    """Return what the formulas say of the bytes of the tiled MLPs, by variant. peak: the formula of the half."""
    return {name: peak(shape, plan) + saved_bytes(shape, plan, keep=keep) for name, keep in TILED.items()}


def measure_times(
    workload: Workload,
    shards: int,
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    facts: Mapping[str, Mapping[str, Any]],
) -> Rows:
    """Return one result a variant, timed in turn with the others and compared with "plain". Shows them.

    Args:
        facts: what else is known of a variant, by its name.
    """
    summary = summarise(interleave(runs, repeats), "plain")
    show(f"{workload.name}: {workload.sizes}, {workload.dtype}, {shards} shards", summary, "plain")
    shared = {"workload": workload.name, "shards": shards, "repeats": repeats}
    return [{"variant": name, **shared, **row, **facts.get(name, {})} for name, row in summary.items()]


def require_parity(half: str, op: str) -> str:
    """Run the op's parity tests of one half; InputError unless they are green. Return pytest's closing line."""
    tests = ROOT / "tests" / op / f"test_both_{op}.py"
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

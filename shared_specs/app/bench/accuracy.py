"""What `bench --op accuracy` of both halves shares: the operands, the truth in float64, the rows of its record."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from shared_specs.app.bench.workloads import AccuracyWorkload
from shared_specs.core.rounding import relative_error
from shared_specs.mlp.cases import MLPCase, make_inputs
from shared_specs.reference import baseline, oracle
from shared_specs.tolerances import limit

Array = np.ndarray[Any, Any]
Run = Callable[[], Mapping[str, Array]]

WEIGHTS = ("dw_gate", "dw_up", "dw_down")


def inputs_of(workload: AccuracyWorkload) -> dict[str, Array]:
    """Return x and dy [T, H], w_gate and w_up [H, I], w_down [I, H] in the workload's dtype, the same for both halves."""
    return make_inputs(case_of(workload))


def measure_errors(
    workload: AccuracyWorkload, own: Mapping[str, Run], peers: Mapping[str, Run], missing: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return one row a variant, "plain" first: its errors against float64, or why it was left out. Shows them.

    Args:
        own: name -> run that gives y, dx and dw_* (weights [in, out]); what it raises ends the benchmark.
        peers: the same of other libraries; what it raises is a row. missing: name -> why there is no run.
    """
    case = case_of(workload)
    truth, rounded = oracle(case), baseline(case)
    limits = {name: limit(relative_error(rounded[name], truth[name]), case.dtype) for name in truth}
    errors: dict[str, dict[str, float]] = {}
    left_out = dict(missing)
    for name, run in {**own, **peers}.items():
        try:
            found = run()
            errors[name] = {quantity: relative_error(found[quantity], truth[quantity]) for quantity in truth}
        except Exception as error:
            if name in own:
                raise
            left_out[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        _check(name, errors[name], limits)
    shared = {"workload": workload.name, "shards": workload.shards}
    rows = [{"variant": name, **shared, **_summary(found, errors["plain"])} for name, found in errors.items()]
    rows += [{"variant": name, **shared, "left_out": reason} for name, reason in left_out.items()]
    _show(workload, rows)
    return rows


def case_of(workload: AccuracyWorkload) -> MLPCase:
    return MLPCase(
        dims=(workload.tokens,),
        hidden=workload.hidden,
        intermediate=workload.intermediate,
        dtype=workload.dtype,
        num_shards=workload.shards,
        reason=workload.reason,
    )


def _check(name: str, errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """y and dx are no sums over shards, so every variant has them right; the plain one its weight gradients too.

    Of the others these may have drifted, but not as far off as zeros are.
    """
    for quantity, error in errors.items():
        drifts = name != "plain" and quantity in WEIGHTS
        if not (error < 1 if drifts else error <= limits[quantity]):
            raise RuntimeError(f"bench: {name} does not compute {quantity}")


def _summary(errors: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, Any]:
    """Return the errors, the worst of the weight gradients, and the worst ratio of one to its plain error."""
    return {
        "errors": dict(errors),
        "worst_weight_error": max(errors[name] for name in WEIGHTS),
        "ratio_to_plain": max(errors[name] / plain[name] for name in WEIGHTS),
    }


def _show(workload: AccuracyWorkload, rows: list[dict[str, Any]]) -> None:
    title = f"{workload.name}: {workload.sizes}, {workload.dtype}, {workload.shards} shards, errors against float64"
    table = Table(Column("variant", no_wrap=True), "y", "dx", *WEIGHTS, "x plain", title=title)
    for row in rows:
        if "left_out" in row:
            print(f"{row['variant']}: left out: {row['left_out']}", file=sys.stderr)
            continue
        errors = (f"{row['errors'][name]:.2%}" for name in ("y", "dx", *WEIGHTS))
        table.add_row(row["variant"], *errors, f"{row['ratio_to_plain']:.2f}")
    Console().print(table)

"""`bench --op model`: the loss and the gradients of a whole model on real text, and their errors against float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from shared_specs.app.bench.workloads import ModelWorkload
from shared_specs.app.data.text import read_text
from shared_specs.app.models.weights import ModelFiles
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import BENCH_MODEL

Array = np.ndarray[Any, Any]
Found = tuple[float, dict[str, Array]]  # the loss, and the gradient of every parameter by its name


def tokens_of(workload: ModelWorkload, files: ModelFiles) -> Array:
    """Return [1, T] int64: the beginning of Python's own manual, which is a topic on assertions."""
    ids = files.tokenizer.encode(read_text(None))
    return np.asarray(ids[: workload.tokens], np.int64)[None]


def measure_model(
    workload: ModelWorkload, truth: Found, runs: Mapping[str, Callable[[], Found]]
) -> list[dict[str, Any]]:
    """Return one row a variant: the relative error of its loss, of all gradients as one vector, and of the worst of them, with
    its parameter. Shows them.

    Args:
        truth: in float64. runs: name -> how to compute it; one after the other, so that one set of gradients exists.
    Raises:
        RuntimeError: a loss or a gradient is none of this model's.
    """
    rows = []
    for name, run in runs.items():
        loss, gradients = run()
        errors = {parameter: relative_error(gradients[parameter], truth[1][parameter]) for parameter in truth[1]}
        loss_error = abs(loss - truth[0]) / truth[0]
        most = BENCH_MODEL[workload.dtype]
        if not all(error <= most for error in (loss_error, *errors.values())):  # nor where it is NaN
            raise RuntimeError(f"bench: {name} does not compute the model's loss and gradients")
        worst = max(errors, key=lambda parameter: errors[parameter])
        row = {
            "variant": name,
            "workload": workload.name,
            "loss": loss,
            "loss_float64": truth[0],
            "loss_error": loss_error,
        }
        row |= {"worst_gradient_error": errors[worst], "worst_gradient": worst}
        row["gradients_error"] = _of_all(gradients, truth[1])
        rows.append(row)
    _show(workload, rows)
    return rows


def _of_all(gradients: Mapping[str, Array], truth: Mapping[str, Array]) -> float:
    """Return the relative error of all gradients as one vector."""
    off = sum(float(np.sum((gradients[name].astype(np.float64) - truth[name]) ** 2)) for name in truth)
    return (off / sum(float(np.sum(truth[name] ** 2)) for name in truth)) ** 0.5


def _show(workload: ModelWorkload, rows: list[dict[str, Any]]) -> None:
    table = Table(
        "variant", "loss", "gradients", "worst gradient", "of", title=f"{workload.name}: errors against float64"
    )
    for row in rows:
        errors = (f"{row[name]:.1e}" for name in ("loss_error", "gradients_error", "worst_gradient_error"))
        table.add_row(row["variant"], *errors, row["worst_gradient"])
    Console().print(table)

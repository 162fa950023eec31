"""The picture of a run: loss and peak memory over its steps."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

GIB = 2**30


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write a PNG with the loss and the peak memory of each run (label to step records), replacing an older one."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    loss, memory = figure.subplots(1, 2)
    for label, records in runs.items():
        steps = [record["step"] for record in records]
        marker = "o" if len(steps) < 30 else None
        loss.plot(steps, [record["loss"] for record in records], marker=marker, label=label)
        memory.plot(steps, [record["peak_bytes"] / GIB for record in records], marker=marker, label=label)
    for axes, title in ((loss, "loss (nats per token)"), (memory, "peak memory of the step (GiB)")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    memory.set_ylim(0, 1.05 * memory.dataLim.y1)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=120)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

"""The picture of a run: loss and peak memory over its steps."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from shared_specs.app.progress import GIB

Records = Sequence[Mapping[str, Any]]
MANY_STEPS = 200  # from here on the losses of single steps are a band, and their mean is the curve


def plot_runs(runs: Mapping[str, Records], path: Path, held_out: Mapping[str, Records] | None = None) -> None:
    """Write a PNG with the loss and the peak memory of each run (label to step records), replacing an older one.

    Of MANY_STEPS or more the losses are drawn pale, with their running mean over a fiftieth of the steps.

    held_out: records of evaluations in the same form, whose losses are drawn too.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    loss, memory = figure.subplots(1, 2)
    for label, records in runs.items():
        steps = [record["step"] for record in records]
        marker = "o" if len(steps) < 30 else None
        (line,) = loss.plot(steps, [record["loss"] for record in records], marker=marker, label=label)
        if len(steps) >= MANY_STEPS:
            _draw_mean(loss, line)
        memory.plot(steps, [record["peak_bytes"] / GIB for record in records], marker=marker, label=label)
    for label, records in (held_out or {}).items():
        steps, losses = ([record[name] for record in records] for name in ("step", "loss"))
        loss.plot(steps, losses, marker="s" if len(steps) < 30 else None, linestyle="--", label=label)
    for axes, title in ((loss, "loss (nats per token)"), (memory, "peak memory of the step (GiB)")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    memory.set_ylim(0, 1.05 * memory.dataLim.y1)
    save_figure(figure, path)


def _draw_mean(axes: Axes, line: Line2D) -> None:
    """Make the line of single steps pale, behind all others, and draw its mean over the last steps in its own colour."""
    colour, (steps, losses) = to_rgb(line.get_color()), np.asarray(line.get_xydata()).T
    window = len(steps) // 50
    line.set(color=[0.35 * part + 0.65 for part in colour], linewidth=0.8, zorder=1.5)
    sums, counts = (np.convolve(each, np.ones(window))[: len(steps)] for each in (losses, np.ones(len(steps))))
    axes.plot(steps, sums / counts, color=colour, label=f"{line.get_label()}, mean of {window} steps")


def save_figure(figure: Figure, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the figure whole or not at all. metadata: texts that the PNG has with it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=120, metadata=dict(metadata or {}))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

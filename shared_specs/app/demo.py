"""`python -m shared_specs.app.demo [--long]`: the main job, plain against tiled, in PyTorch and in JAX.

Four fine-tuning runs of the same model on the same text, one after another in processes of their own, have to show the
same losses; then one tiled step at a context whose plain memory is more than this machine has.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from shared_specs.app.log import read_log, step_records
from shared_specs.app.plots import GIB, save_figure
from shared_specs.app.predict import plain_step
from shared_specs.app.progress import show_bytes
from shared_specs.tolerances import DEMO_LOSS_RTOL

OUT = Path("out/demo")
STEPS, TOKENS = 3, 1024
LONG_TOKENS, LONG_SCALE = 12288, 2
HALVES = {"PyTorch": "tiled_torch", "JAX": "tiled_jax"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process of the demo; `flags` are those of `finetune`."""

    label: str
    package: str
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run's log says."""

    run: Run
    start: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.steps]

    @property
    def peak_bytes(self) -> int:
        return max(record["peak_bytes"] for record in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """The fastest step: the first one compiles."""
        return max(record["tokens_per_second"] for record in self.steps)


def short_runs() -> list[Run]:
    """Plain and tiled in both halves."""
    flags = ("--tokens", str(TOKENS), "--steps", str(STEPS))
    return [
        Run(label=f"{half}, {kind}", package=package, flags=(*flags, *extra))
        for half, package in HALVES.items()
        for kind, extra in (("plain", ("--plain",)), ("tiled", ()))
    ]


def long_run(half: str) -> Run:
    """One tiled step at the long context."""
    flags = ("--tokens", str(LONG_TOKENS), "--steps", "1", "--rope-scale", str(LONG_SCALE))
    return Run(label=f"{half}, tiled, long", package=HALVES[half], flags=flags)


def execute(run: Run, folder: Path, console: Console) -> Result | None:
    """Run one process to its end, its lines shown as they come; None where it failed."""
    out = folder / run.package / "-".join(run.label.split(", ")[1:])
    words = ["-m", run.package, "finetune", *run.flags, "--device", "cpu", "--seed", "0", "--out", str(out)]
    console.rule(run.label, align="left")
    code = subprocess.run([sys.executable, *words], env=os.environ | {"PYTHONUNBUFFERED": "1"}).returncode
    if code != 0:
        console.print(f"[bold]{run.label} ended with exit code {code}[/]")
        return None
    records = read_log(out)
    for saved in ("checkpoints", "model"):  # two gigabytes a run that nobody asked to keep
        shutil.rmtree(out / saved)
    return Result(run=run, start=records[0], steps=step_records(records))


def largest_difference(results: list[Result]) -> float:
    """Largest relative difference of a step's loss between any two runs."""
    worst = 0.0
    for losses in zip(*(result.losses for result in results), strict=True):
        worst = max(worst, (max(losses) - min(losses)) / min(losses))
    return worst


def table(results: list[Result]) -> Table:
    """One row a run; below a long run its prediction without tiling."""
    shown = Table(title="SmolLM2-135M-Instruct fine-tuned in float32 on the same text")
    shown.add_column("run")
    for name in ("tokens", *(f"loss {step}" for step in range(1, STEPS + 1)), "peak memory", "tokens/s"):
        shown.add_column(name, justify="right")
    for result in results:
        tokens = result.start["options"]["tokens"]
        losses = [f"{loss:.6f}" for loss in result.losses] + [""] * (STEPS - len(result.losses))
        speed = f"{result.tokens_per_second:.0f}"
        shown.add_row(result.run.label, str(tokens), *losses, show_bytes(result.peak_bytes), speed)
    for result in results:
        if "--rope-scale" in result.run.flags:
            peak = f"> {show_bytes(plain_step(result.start['config'], LONG_TOKENS).peak)}"
            shown.add_row("plain, predicted", str(LONG_TOKENS), *[""] * STEPS, peak, "")
            break
    return shown


def picture(results: list[Result], path: Path) -> None:
    """Losses of the short runs, and the peak memory of all with the prediction and this machine's memory."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, memory = figure.subplots(1, 2)
    markers = iter("osx+^v")
    for result in results:
        if len(result.steps) > 1:
            steps = [record["step"] for record in result.steps]
            loss.plot(steps, result.losses, marker=next(markers), alpha=0.7, label=result.run.label)
    loss.set_title("loss (nats per token)")
    loss.set_xlabel("step")
    loss.set_xticks(range(1, STEPS + 1))
    if loss.lines:
        loss.legend()
    labels = [f"{result.run.label}\n{result.start['options']['tokens']} tokens" for result in results]
    peaks = [result.peak_bytes / GIB for result in results]
    long = [result for result in results if "--rope-scale" in result.run.flags]
    colors = ["tab:gray" if "plain" in label else "tab:blue" for label in labels]
    if long:
        labels.append(f"plain, predicted\n{LONG_TOKENS} tokens")
        peaks.append(plain_step(long[0].start["config"], LONG_TOKENS).peak / GIB)
        colors.append("lightgray")
    memory.barh(labels, peaks, color=colors)
    memory.axvline(psutil.virtual_memory().total / GIB, color="tab:red", linestyle="--", label="this machine")
    memory.invert_yaxis()
    memory.set_title("peak memory (GiB)")
    memory.legend()
    save_figure(figure, path)


def record(results: list[Result], seconds: float) -> dict[str, Any]:
    """What was measured, on what."""
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "seconds": seconds,
        "runs": [
            {
                "label": result.run.label,
                "flags": result.run.flags,
                "versions": result.start["versions"],
                "steps": result.steps,
                "plain_peak_bytes_predicted": plain_step(
                    result.start["config"], result.start["options"]["tokens"] * result.start["options"]["batch"]
                ).peak,
            }
            for result in results
        ],
    }


def verdict(results: list[Result], console: Console) -> int:
    """Say whether the short runs agree; the exit code."""
    short = [result for result in results if len(result.steps) > 1]
    if not short:
        return 0
    difference = largest_difference(short)
    agree = difference <= DEMO_LOSS_RTOL
    console.print(
        f"The losses of the {len(short)} runs differ by at most {difference:.1e} of their value; "
        f"{'within' if agree else 'MORE THAN'} the tolerance {DEMO_LOSS_RTOL:.0e}.",
        highlight=False,
    )
    return 0 if agree else 1


def main(arguments: list[str]) -> int:
    """The exit code: 0 when every run ended well and all short runs had the same losses."""
    if arguments not in ([], ["--long"]):
        print("demo: the only option is --long: the long step in both halves, nothing else.", file=sys.stderr)
        return 2
    console = Console()
    runs = [long_run(half) for half in HALVES] if arguments else [*short_runs(), long_run("PyTorch")]
    name = "demo-long" if arguments else "demo"
    began = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory(prefix="tiled-demo-") as folder:
        for run in runs:
            result = execute(run, Path(folder), console)
            if result is None:
                return 1
            results.append(result)
    seconds = time.perf_counter() - began
    OUT.mkdir(parents=True, exist_ok=True)
    picture(results, OUT / f"{name}.png")
    (OUT / f"{name}.json").write_text(json.dumps(record(results, seconds), indent=2) + "\n")
    console.print(table(results))
    code = verdict(results, console)
    memory = show_bytes(psutil.virtual_memory().total)
    console.print(
        f"This machine has {memory}. {seconds:.0f} s in all; picture and numbers are in {OUT}.", highlight=False
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

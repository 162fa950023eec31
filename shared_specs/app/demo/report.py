"""What the demo shows of its runs: one table, one picture, one record, and whether their losses agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from shared_specs.app.bench.records import make_record
from shared_specs.app.demo.contexts import VARIANTS, Measured, draw_contexts
from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.memory import machine_bytes
from shared_specs.app.plots import save_figure
from shared_specs.app.progress import GIB, show_bytes
from shared_specs.tolerances import DEMO_LOSS_RTOL


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process of the demo.

    Attributes:
        flags: of `finetune`.
        long: whether it is the step at a context made for tiling.
        variant: of `contexts.VARIANTS`, for the picture of memory against context; None where it is no point there.
    """

    label: str
    package: str
    flags: tuple[str, ...]
    long: bool = False
    variant: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The log of one run: its first record and those of its steps."""

    run: Run
    start: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Context length."""
        return self.start["options"]["tokens"]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.steps]

    @property
    def peak_bytes(self) -> int:
        return max(record["peak_bytes"] for record in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the fastest step: the first one allocates and compiles."""
        return max(record["tokens_per_second"] for record in self.steps)

    @property
    def plain_peak_bytes(self) -> int:
        """Return the bytes that the same step needs without tiling: the formula's on top of those the process had before."""
        step = plain_step(self.start["config"], self.tokens * self.start["options"]["batch"])
        return self.start["bytes_before_model"] + step.peak

    @property
    def predicted_bytes(self) -> int | None:
        """Return what the picture's curve says of the process in its first step; None where the run is no point there."""
        if self.run.variant is None:
            return None
        model = VARIANTS[self.run.variant].model_bytes(self.start["config"], self.tokens)
        return self.start["bytes_before_model"] + model


def largest_difference(results: Sequence[Result]) -> float:
    """Return the largest relative difference of a step's loss between any two runs."""
    worst = 0.0
    for losses in zip(*(result.losses for result in results), strict=True):
        worst = max(worst, (max(losses) - min(losses)) / min(losses))
    return worst


def table(results: Sequence[Result]) -> Table:
    """Return one row a run, and under a long one what it would need without tiling."""
    steps = max(len(result.steps) for result in results)
    shown = Table(box=SIMPLE, title="SmolLM2-135M-Instruct fine-tuned in float32 on the same text")
    shown.add_column("run")
    for name in ("tokens", *(f"loss {step + 1}" for step in range(steps)), "peak memory", "tokens/s"):
        shown.add_column(name, justify="right")
    for result in results:
        losses = [f"{loss:.5f}" for loss in result.losses] + [""] * (steps - len(result.steps))
        speed = f"{result.tokens_per_second:.0f}"
        shown.add_row(result.run.label, str(result.tokens), *losses, show_bytes(result.peak_bytes), speed)
    for long in [result for result in results if result.run.long][:1]:
        peak = f"> {show_bytes(long.plain_peak_bytes)}"
        shown.add_row("plain, predicted", str(long.tokens), *[""] * steps, peak, "")
    return shown


def picture(results: Sequence[Result], path: Path) -> None:
    """Losses of the runs with several steps, and memory against context; of long runs alone bars beside the prediction."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    several = [result for result in results if len(result.steps) > 1]
    if several:
        loss, memory = figure.subplots(1, 2)
        _draw_losses(loss, several)
        start = several[0].start
        draw_contexts(memory, start["config"], start["bytes_before_model"], measured(results))
    else:
        _draw_memory(figure.subplots(), results)
    save_figure(figure, path)


def measured(results: Sequence[Result]) -> list[Measured]:
    """Return the points of the picture of memory against context."""
    return [
        Measured(variant=result.run.variant, tokens=result.tokens, peak_bytes=result.steps[0]["peak_bytes"])
        for result in results
        if result.run.variant is not None
    ]


def _draw_losses(axes: Axes, results: Sequence[Result]) -> None:
    for size, result in enumerate(results):
        steps = [record["step"] for record in result.steps]
        # The curves lie on one another: larger circles behind show that there are several.
        marker = {"marker": "o", "markersize": 4 * (len(results) - size), "markerfacecolor": "none"}
        axes.plot(steps, result.losses, label=result.run.label, **marker)
    axes.set_title("loss (nats per token)")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(axes: Axes, results: Sequence[Result]) -> None:
    bars = [
        (result.run.label, result.tokens, result.peak_bytes, "tab:gray" if "plain" in result.run.label else "tab:blue")
        for result in results
    ]
    for long in [result for result in results if result.run.long][:1]:
        bars.append(("plain, predicted", long.tokens, long.plain_peak_bytes, "lightgray"))
    labels = [f"{label}\n{tokens} tokens" for label, tokens, _, _ in bars]
    axes.barh(labels, [size / GIB for _, _, size, _ in bars], color=[color for *_, color in bars])
    axes.axvline(machine_bytes() / GIB, color="tab:red", linestyle="--", label="memory of this machine")
    axes.invert_yaxis()
    axes.set_title("peak memory (GiB)")
    axes.legend()


def record(kind: str, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Return what was measured, and on what, in the form of `shared_specs.app.bench.records`; `seconds` is of the whole
    demo.
    """
    rows = [
        {
            "label": result.run.label,
            "flags": list(result.run.flags),
            "tokens": result.tokens,
            "losses": result.losses,
            "peak_bytes": result.peak_bytes,
            "plain_peak_bytes_predicted": result.plain_peak_bytes,
            "first_step_peak_bytes": result.steps[0]["peak_bytes"],
            "first_step_bytes_predicted": result.predicted_bytes,
            "tokens_per_second": result.tokens_per_second,
            "seconds": [step["seconds"] for step in result.steps],
        }
        for result in results
    ]
    packages = ("torch", "transformers", "jax", "jaxlib", "flax", "numpy")
    return make_record(kind, "shared_specs.app.demo", packages, rows, seconds=seconds)


def verdict(results: Sequence[Result], console: Console, peak_bytes: int | None = None) -> int:
    """Say whether runs of the same steps have the same losses, whether the long step would fit plainly, and whether all
    stayed below `peak_bytes`; the exit code, which does not depend on what would fit."""
    code = 0
    for tokens in dict.fromkeys(result.tokens for result in results):
        same = [result for result in results if result.tokens == tokens]
        if len(same) > 1:
            difference = largest_difference(same)
            agree = difference <= DEMO_LOSS_RTOL
            code |= not agree
            _say(
                console,
                f"The losses of the {len(same)} runs on {tokens} tokens differ by at most {difference:.1e} of their value, "
                f"{'within' if agree else 'MORE THAN'} the tolerance of {DEMO_LOSS_RTOL:.0e}.",
            )
    for long in [result for result in results if result.run.long][:1]:
        fits = long.plain_peak_bytes <= machine_bytes()
        _say(
            console,
            f"One step on {long.tokens} tokens without tiling would take more than {show_bytes(long.plain_peak_bytes)}; "
            f"this machine has {show_bytes(machine_bytes())}, "
            f"{'large enough for plain training too' if fits else 'too little for plain training'}.",
        )
    if peak_bytes is not None:
        most = max(result.peak_bytes for result in results)
        code |= most > peak_bytes
        words = "below" if most <= peak_bytes else "MORE THAN"
        _say(
            console,
            f"The most memory a run took is {most / 1e9:.2f} GB, {words} the {peak_bytes / 1e9:.0f} GB allowed.",
        )
    return int(code)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)

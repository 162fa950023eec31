"""What a run shows while it goes: a live line on a terminal, one plain line a step elsewhere."""

import contextlib
import os
import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shared_specs.app.plots import GIB


def show_bytes(count: float) -> str:
    """`3.1 GiB`."""
    return f"{count / GIB:.1f} GiB"


class RunProgress:
    """Shows step, loss, tokens per second, peak memory and the time left."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._console = console
        self._total = total
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        # Steps may take minutes: the estimate looks at the whole run, not at the last half minute.
        self._bar = Progress(
            *columns, console=console, disable=not console.is_terminal, speed_estimate_period=float("inf")
        )
        self._task = self._bar.add_task("", total=total, completed=done, numbers="loss ...")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: dict[str, Any], seconds_left: float) -> None:
        """Show a finished step."""
        numbers = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:.0f} tokens/s  "
            f"peak {show_bytes(record['peak_bytes'])}"
        )
        self._bar.update(self._task, completed=record["step"], numbers=numbers)
        if not self._console.is_terminal:
            left = f"{int(seconds_left // 60)}:{int(seconds_left % 60):02d}"
            self.say(f"step {record['step']}/{self._total}  {numbers}  left {left}")

    def say(self, text: str) -> None:
        """A line above the live one. Where nobody reads any more, once a line that says so, and the run goes on."""
        try:
            self._bar.console.print(text, highlight=False, soft_wrap=True)
        except (OSError, SystemExit) as error:  # SystemExit is rich's answer to a closed pipe
            reason = error.strerror if isinstance(error, OSError) else "the pipe is closed"
            self._bar.stop()
            self._console.quiet = True
            if self._console.file is sys.stdout:  # what is left in its buffer would fail again at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            with contextlib.suppress(OSError):
                print(f"finetune: its lines cannot be shown ({reason}); the run goes on, see its log.", file=sys.stderr)

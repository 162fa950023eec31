"""What a run shows while it goes: a live line on a terminal; elsewhere one plain line a step, and more within a long one."""

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

GIB = 2**30

# Characters of a terminal's line from which on there is room for a bar, and of the bar.
_WIDE, _BAR = 130, 24
QUIET_SECONDS = 10  # within a step no plain line follows another one sooner


def show_bytes(count: float) -> str:
    """`3.1 GiB`."""
    return f"{count / GIB:.1f} GiB"


def show_time(seconds: float) -> str:
    """`12:05`, of hours `1:12:05`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _whole() -> Column:
    """Return a column that is never cut to make room for another one."""
    return Column(no_wrap=True, overflow="ignore", min_width=1)


class RunProgress:
    """Shows step, loss, tokens per second, peak memory and the time left."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._console = console
        self._total, self._done = total, done
        self._done_before, self._numbers = done, ["loss ..."]
        self._began = self._said = time.monotonic()
        wide = console.width >= _WIDE
        columns = (
            TextColumn("step", table_column=_whole()),
            MofNCompleteColumn(table_column=_whole()),
            *((BarColumn(_BAR),) if wide else ()),
            TextColumn("{task.fields[numbers]}"),
            *((TimeElapsedColumn(table_column=_whole()),) if wide else ()),
            TextColumn("left", table_column=_whole()),
            TimeRemainingColumn(elapsed_when_finished=False, table_column=_whole()),
        )
        # Of a terminal's line: between the columns is a blank, and a time is 0:00:00.
        taken = (
            len("step")
            + 2 * len(str(total))
            + 1
            + len("left")
            + len("0:00:00")
            + 4
            + wide * (_BAR + len("0:00:00") + 2)
        )
        self._room = console.width - taken
        # Steps may take minutes: the estimate looks at the whole run, not at the last half minute.
        self._bar = Progress(
            *columns, console=console, disable=not console.is_terminal, speed_estimate_period=float("inf")
        )
        self._task = self._bar.add_task("", total=total, completed=done, numbers=self._fitting())

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Show a finished step."""
        self._done = record["step"]
        self._numbers = [
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_second']:.0f} tokens/s",
            f"peak {show_bytes(record['peak_bytes'])}",
        ]
        self._bar.update(self._task, completed=self._done, numbers=self._fitting())
        if not self._console.is_terminal:
            self._line(f"step {self._done}/{self._total}  {'  '.join(self._numbers)}", 0.0)

    def within(self, fraction: float, phase: str, layer: int, layers: int) -> None:
        """Show how far the step in progress has come: `layer` of `layers` are through forward or backward."""
        where = f"{phase} {layer}/{layers}"
        self._bar.update(self._task, completed=self._done + fraction, numbers=self._fitting(where))
        if not self._console.is_terminal and time.monotonic() - self._said >= QUIET_SECONDS:
            self._line(f"step {self._done + 1}/{self._total}  {where}", fraction)

    def evaluating(self, number: int, count: int) -> None:
        """Show how far the evaluation between two steps has come."""
        where = f"held out {number}/{count}"
        self._bar.update(self._task, numbers=self._fitting(where))
        if not self._console.is_terminal and time.monotonic() - self._said >= QUIET_SECONDS:
            self._said = time.monotonic()
            self.say(where)

    def _fitting(self, *where: str) -> str:
        """Return the loss and, as far as there is room in a terminal's line, where the run is and the other numbers."""
        shown = [*self._numbers, *where]
        for left_out in (*reversed(self._numbers[1:]), *where):
            if len("  ".join(shown)) > self._room:
                shown.remove(left_out)
        return "  ".join(shown)

    def _line(self, text: str, fraction: float) -> None:
        """Say where the run is, and how long it still takes if it goes on as it has gone so far."""
        self._said = time.monotonic()
        done = self._done - self._done_before + fraction
        left = (self._said - self._began) / done * (self._total - self._done - fraction)
        self.say(f"{text}  left {show_time(left)}")

    def say(self, text: str) -> None:
        """Print a line above the live one. Where the output is closed, say so once and go on."""
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

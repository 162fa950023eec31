"""How far a step is: layers that a trainer tells of, as a fraction, and the lines that a run shows within a step."""

import io
import re

import pytest
from rich.console import Console

from shared_specs.app import progress
from shared_specs.app.finetune.step_progress import RECOMPUTED_BACKWARD, StepProgress
from shared_specs.app.progress import GIB, RunProgress, show_time


def seen(events: list[tuple[str, int]], **options: float) -> list[tuple[float, str, int, int]]:
    shown: list[tuple[float, str, int, int]] = []
    steps = StepProgress(lambda *values: shown.append(values), **options)
    for phase, times in events:
        for _ in range(times):
            steps.heard(phase, 2)
    return shown


def test_forward_is_a_third_and_a_quarter_where_it_is_done_again() -> None:
    shown = seen([("forward", 2), ("backward", 2)])
    assert [values[1:] for values in shown] == [
        ("forward", 1, 2),
        ("forward", 2, 2),
        ("backward", 1, 2),
        ("backward", 2, 2),
    ]
    assert [values[0] for values in shown] == [1 / 6, 1 / 3, 2 / 3, 1]
    assert seen([("forward", 2)], backward=RECOMPUTED_BACKWARD)[-1][0] == 1 / 4


def test_layers_that_backward_computes_again_do_not_count() -> None:
    again = [("forward", 2), ("forward", 1), ("backward", 1), ("forward", 1), ("backward", 1)]
    assert seen(again) == seen([("forward", 2), ("backward", 2)])


def test_micro_batches_are_parts_of_one_step() -> None:
    shown = seen([("forward", 2), ("backward", 2)] * 2, micro_batches=2)
    assert shown[3][0] == 1 / 2
    assert shown[-1] == (1, "backward", 2, 2)


def test_a_long_step_is_told_of_where_nobody_has_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on with the time that is left; lines that follow at once are left out."""
    clock = iter([0.0, 5.0, 12.0, 12.0, 13.0, 24.0, 24.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    file = io.StringIO()
    run = RunProgress(2, 0, Console(file=file, width=200))
    run.within(0.1, "forward", 1, 2)
    run.within(0.25, "forward", 2, 2)
    run.within(0.3, "backward", 1, 2)
    run.step({"step": 1, "loss": 2.0, "tokens_per_second": 7.0, "peak_bytes": 2**30})
    lines = file.getvalue().splitlines()
    assert lines[0] == "step 1/2  forward 2/2  left 1:24"  # a quarter of a step took 12 s, of two 1.75 are left
    assert lines[1] == "step 1/2  loss 2.0000  7 tokens/s  peak 1.0 GiB  left 0:24"
    assert len(lines) == 2


def test_times() -> None:
    assert [show_time(seconds) for seconds in (5, 725, 4325)] == ["0:05", "12:05", "1:12:05"]


@pytest.mark.parametrize("width", [40, 60, 80, 109, 129, 130, 200])
def test_a_line_fits_its_terminal_and_shows_step_and_loss_whole(width):
    """What there is no room for is left out, never cut; the last drawn line is what a terminal shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    progress = RunProgress(1000, 996, console)
    with progress:
        progress.step({"step": 999, "loss": 11.12345, "tokens_per_second": 123456.0, "peak_bytes": 64 * GIB})
        progress.within(0.5, "backward", 12, 32)
        progress.evaluating(3, 50)
        progress._bar.refresh()
    line = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").splitlines()[-1]
    assert len(line) <= width
    assert re.match(r"step +999/1000 ", line), line
    assert "loss 11.1235" in line
    assert ("held out 3/50" in line) == (width >= 60)
    assert "left" in line
    assert "…" not in line
    assert ("tokens/s" in line, "peak 64.0 GiB" in line) == (width >= 80, width >= 109)

"""The picture of a run: its curves are the log's numbers, and the file shows them."""

import io
import itertools

import numpy as np
import pytest
from rich.console import Console

from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import PLOT_NAME, finetune
from shared_specs.app.options import FinetuneOptions
from shared_specs.app.plots import plot_runs
from shared_specs.app.progress import GIB
from tests.fake_trainer import FakeTrainer
from tests.pictures import assert_shows, curves, saved_figures
from tests.tiny_model import write_inputs


def records(losses, peaks):
    return [
        {"step": step, "loss": loss, "peak_bytes": peak}
        for step, (loss, peak) in enumerate(zip(losses, peaks, strict=True), 1)
    ]


RUNS = {
    "plain": records([3.5, 2.5, 2.75, 2.0], [3 * GIB, 4 * GIB, 4 * GIB, 4.5 * GIB]),
    "tiled": records([3.0, 2.25, 1.5], [GIB, 1.5 * GIB, 2 * GIB]),
}


def test_curves_are_the_numbers_of_the_records(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    plot_runs(RUNS, tmp_path / "picture.png")
    (figure,) = figures
    loss, memory = figure.axes
    assert curves(loss) == {label: [(row["step"], row["loss"]) for row in rows] for label, rows in RUNS.items()}
    assert curves(memory) == {
        label: [(row["step"], row["peak_bytes"] / GIB) for row in rows] for label, rows in RUNS.items()
    }
    assert [axes.get_title() for axes in figure.axes] == ["loss (nats per token)", "peak memory of the step (GiB)"]
    assert memory.get_ylim()[0] == 0
    assert_shows(tmp_path / "picture.png", figure)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("steps", [1, 100])
def test_one_step_and_many(tmp_path, monkeypatch, steps):
    """A single point has no line; many are a line without markers."""
    figures = saved_figures(monkeypatch)
    numbers = [3 / (1 + n) for n in range(steps)], [GIB * (1 + n / 50) for n in range(steps)]
    plot_runs({"tiled": records(*numbers)}, tmp_path / "picture.png")
    assert_shows(tmp_path / "picture.png", figures[0])


def noisy(steps, seed=0):
    """Losses that fall and vary, in 1024ths, whose sums are exact; peaks that are higher at some steps."""
    numbers, random = np.arange(1, steps + 1), np.random.default_rng(seed)
    losses = 2 + 2 * np.exp(-numbers / 80) + random.normal(0, 0.15, steps)
    return records((np.round(losses * 1024) / 1024).tolist(), [GIB * (2 + (n % 50 == 0)) for n in numbers.tolist()])


@pytest.mark.deep
def test_of_a_thousand_steps_the_mean_is_the_curve(tmp_path, monkeypatch):
    figures, rows = saved_figures(monkeypatch), noisy(1000)
    held_out = [{"step": step, "loss": 3.5 - step / 1000} for step in range(50, 1001, 50)]
    plot_runs({"tiled": rows}, tmp_path / "picture.png", {"held out": held_out})
    loss = figures[0].axes[0]
    found = curves(loss)
    assert list(found) == ["tiled", "tiled, mean of 20 steps", "held out"]
    assert found["tiled"] == [(row["step"], row["loss"]) for row in rows]
    losses = [row["loss"] for row in rows]
    for step, mean in found["tiled, mean of 20 steps"]:
        assert mean == np.mean(losses[max(0, int(step) - 20) : int(step)])
    assert_shows(tmp_path / "picture.png", figures[0])


@pytest.mark.deep
def test_two_runs_of_a_thousand_steps_are_told_apart(tmp_path, monkeypatch):
    """The band of either is behind both means, which are seen."""
    figures, runs = saved_figures(monkeypatch), {"first": noisy(1000), "second": noisy(1000, seed=1)}
    runs["second"] = [
        row | {"loss": row["loss"] - 0.15, "peak_bytes": row["peak_bytes"] + GIB // 8} for row in runs["second"]
    ]
    plot_runs(runs, tmp_path / "picture.png")
    assert_shows(tmp_path / "picture.png", figures[0], covered=["first", "second"])


def test_memory_that_hardly_changes_is_seen(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    plot_runs({"tiled": records([3 - n / 100 for n in range(100)], [GIB + n for n in range(100)])}, tmp_path / "p")
    assert_shows(tmp_path / "p", figures[0])


def test_an_older_picture_is_replaced(tmp_path, monkeypatch):
    figures, path = saved_figures(monkeypatch), tmp_path / "picture.png"
    for runs in (RUNS, {"tiled": RUNS["tiled"]}):
        plot_runs(runs, path)
    assert_shows(path, figures[1])
    with pytest.raises(AssertionError):
        assert_shows(path, figures[0])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.deep
def test_a_run_and_its_continuation_show_their_log(tmp_path, monkeypatch):
    inputs, figures, out = write_inputs(tmp_path / "inputs"), saved_figures(monkeypatch), tmp_path / "run"
    base = {"model": str(inputs / "model"), "text": str(inputs / "text"), "out": str(out)}
    sizes = itertools.count(GIB, GIB // 4)
    monkeypatch.setattr(FakeTrainer, "peak_memory_bytes", lambda self: next(sizes))
    for steps in (3, 5):
        options = FinetuneOptions(**base, tokens=32, batch=2, lr=1e-3, steps=steps, resume=steps == 5)
        assert finetune(FakeTrainer(), options, Console(file=io.StringIO())) == 0
        log = step_records(read_log(out))
        assert len(log) == steps
        loss, memory = figures[-1].axes
        assert curves(loss) == {"fake": [(row["step"], row["loss"]) for row in log]}
        assert curves(memory) == {"fake": [(row["step"], row["peak_bytes"] / GIB) for row in log]}
        assert_shows(out / PLOT_NAME, figures[-1])

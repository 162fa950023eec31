"""The demo's report, from made-up runs: what it compares, shows and refuses."""

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from shared_specs.app.demo import report as demo_report
from shared_specs.app.demo import run as demo
from shared_specs.app.demo.report import Result, Run, largest_difference, picture, record, table, verdict
from shared_specs.app.finetune.log import RunLog
from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.progress import show_bytes
from shared_specs.tolerances import DEMO_LOSS_RTOL, FLOOR
from tests.pictures import assert_shows, bars, curves, saved_figures
from tests.tiny_model import tiny_config

GIB = 2**30
BEFORE = GIB // 2


def result(label, losses, tokens=64, long=False):
    steps = [
        {"step": i + 1, "loss": loss, "seconds": 2.0, "tokens_per_second": tokens / 2, "peak_bytes": (i + 1) * GIB}
        for i, loss in enumerate(losses)
    ]
    start = {"config": tiny_config(), "options": {"tokens": tokens, "batch": 1}, "bytes_before_model": BEFORE}
    return Result(run=Run(label=label, package="p", flags=("--x",), long=long), start=start, steps=steps)


def shown(printable):
    console = Console(file=io.StringIO(), width=160)
    console.print(printable)
    return console.file.getvalue()


def test_difference_is_the_largest_of_any_step():
    runs = [result("a", [2.0, 1.0]), result("b", [2.0, 1.01]), result("c", [2.1, 1.0])]
    assert largest_difference(runs) == pytest.approx(0.05, rel=FLOOR["float64"])
    assert largest_difference(runs[:2]) == pytest.approx(0.01, rel=FLOOR["float64"])


@pytest.mark.parametrize(("factor", "code"), [(0.5, 0), (2.0, 1)])
def test_verdict(factor, code):
    console = Console(file=io.StringIO(), width=160)
    runs = [result("a", [2.0, 3.0]), result("b", [2.0, 3.0 * (1 + factor * DEMO_LOSS_RTOL)])]
    assert verdict([*runs, result("long", [7.0], tokens=128, long=True)], console) == code
    assert ("MORE THAN" in console.file.getvalue()) is (code == 1)
    assert "2 runs" in console.file.getvalue()


def test_verdict_on_long_runs():
    console = Console(file=io.StringIO(), width=160)
    runs = [result(name, [2.0], tokens=128, long=True) for name in ("a", "b")]
    assert verdict(runs, console, peak_bytes=2 * GIB) == 0
    assert verdict(runs, console, peak_bytes=GIB - 1) == 1
    assert verdict([runs[0], result("b", [2.1], tokens=128, long=True)], console, peak_bytes=2 * GIB) == 1
    assert "MORE THAN the 1 GB allowed" in console.file.getvalue()


def test_verdict_says_whether_the_long_step_would_fit_plainly(monkeypatch):
    long = result("a", [2.0], tokens=128, long=True)
    for short_of, said, unsaid in ((0, "large enough", "too little"), (1, "too little", "large enough")):
        monkeypatch.setattr(demo_report, "machine_bytes", lambda short_of=short_of: long.plain_peak_bytes - short_of)
        console = Console(file=io.StringIO(), width=160)
        assert verdict([result("b", [2.0]), long], console) == 0
        text = console.file.getvalue()
        assert f"One step on 128 tokens without tiling would take more than {show_bytes(long.plain_peak_bytes)}" in text
        assert f"{said} for plain training" in text
        assert unsaid not in text
    console = Console(file=io.StringIO(), width=160)
    verdict([result("b", [2.0])], console)
    assert "plain training" not in console.file.getvalue()


def test_table_has_every_run_and_the_prediction():
    runs = [result("torch, plain", [2.5, 2.25]), result("torch, long", [1.75], tokens=10**7, long=True)]
    text = shown(table(runs))
    for words in ("torch, plain", "2.50000", "2.25000", "1.75000", "2.0 GiB", "plain, predicted"):
        assert words in text
    assert f"> {(BEFORE + plain_step(tiny_config(), 10**7).peak) / GIB:.1f} GiB" in text
    assert "predicted" not in shown(table(runs[:1]))


def test_picture(tmp_path, monkeypatch):
    figures, path = saved_figures(monkeypatch), tmp_path / "demo.png"
    monkeypatch.setattr(demo_report, "machine_bytes", lambda: 2.75 * GIB)
    runs = [result("torch, plain", [2.5, 2.25]), result("torch, tiled", [2.625, 2.375, 2.0])]
    runs.append(result("torch, long", [1.75], tokens=10**5, long=True))
    picture(runs, path)
    loss, memory = figures[0].axes
    assert curves(loss) == {"torch, plain": [(1, 2.5), (2, 2.25)], "torch, tiled": [(1, 2.625), (2, 2.375), (3, 2.0)]}
    predicted = (BEFORE + plain_step(tiny_config(), 10**5).peak) / GIB
    assert bars(memory) == {
        "torch, plain\n64 tokens": 2,
        "torch, tiled\n64 tokens": 3,
        "torch, long\n100000 tokens": 1,
        "plain, predicted\n100000 tokens": predicted,
    }
    assert curves(memory) == {"memory of this machine": [(2.75, 0), (2.75, 1)]}
    assert_shows(path, figures[0])

    picture(runs[2:], path)  # one step has no curve
    (memory,) = figures[1].axes
    assert list(bars(memory)) == ["torch, long\n100000 tokens", "plain, predicted\n100000 tokens"]
    assert_shows(path, figures[1])


def test_record():
    runs = [result("torch, plain", [2.5, 2.25]), result("torch, long", [1.75], long=True)]
    written = json.loads(json.dumps(record("demo", runs, 12.0)))
    assert written["kind"] == "demo"
    assert written["hardware"]["memory_bytes"]
    assert [row["losses"] for row in written["results"]] == [run.losses for run in runs]
    assert written["results"][1]["plain_peak_bytes_predicted"] == BEFORE + plain_step(tiny_config(), 64).peak


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """The demo with processes that only write a log; yields the command lines and the losses to write."""
    lines, losses = [], {}

    real = demo.subprocess.run

    def run(words, **options_of_run):
        if words[0] == "git":  # the record asks for the commit
            return real(words, **options_of_run)
        lines.append(words)
        options = dict(itertools.pairwise(words))
        out = Path(options["--out"])
        out.mkdir(parents=True)
        for saved in ("checkpoints", "model"):
            (out / saved).mkdir()
        log = RunLog(out)
        count = int(options["--steps"])
        tokens = int(options["--tokens"])
        start = {"config": tiny_config(), "options": {"tokens": tokens, "batch": 1}, "bytes_before_model": BEFORE}
        log.write("start", **start)
        for step, loss in enumerate(losses.get(options["-m"], [3.0, 2.0, 1.0])[:count]):
            numbers = {"seconds": 1.0, "tokens_per_second": 1.0, "peak_bytes": GIB}
            log.write("step", step=step + 1, loss=loss, **numbers)
        log.close()
        return type("Done", (), {"returncode": losses.get("exit code", 0)})

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lines, losses


def test_demo_runs_four_and_then_the_long_one(processes, tmp_path, capsys):
    assert demo.main([]) == 0
    ran = [(words[2], "--plain" in words, "--rope-scale" in words) for words in processes[0]]
    assert ran == [
        ("tiled_torch", True, False),
        ("tiled_torch", False, False),
        ("tiled_jax", True, False),
        ("tiled_jax", False, False),
        ("tiled_torch", False, True),
    ]
    assert sorted(path.name for path in (tmp_path / "out" / "demo").iterdir()) == ["demo.json", "demo.png"]
    out = capsys.readouterr().out
    assert "within the tolerance" in out
    assert f"PyTorch tiled: one step on {demo.LONG_TOKENS} tokens in 1 s" in out


def test_demo_long_runs_both_halves(processes, tmp_path):
    assert demo.main(["--long"]) == 0
    assert [(words[2], "--rope-scale" in words) for words in processes[0]] == [
        ("tiled_torch", True),
        ("tiled_jax", True),
    ]
    assert sorted(path.name for path in (tmp_path / "out" / "demo").iterdir()) == ["demo-long.json", "demo-long.png"]


def test_demo_fails_when_losses_differ(processes, capsys):
    processes[1]["tiled_jax"] = [3.0, 2.0, 1.01]
    assert demo.main([]) == 1
    assert "MORE THAN the tolerance" in capsys.readouterr().out


def test_demo_fails_with_a_run(processes, capsys, tmp_path):
    processes[1]["exit code"] = 9
    assert demo.main([]) == 1
    assert "exit code 9" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_demo_knows_one_option(capsys):
    assert demo.main(["--short"]) == 2
    assert "--long" in capsys.readouterr().err

"""The demo's report, from made-up runs: what it compares, shows and refuses."""

import io
import itertools
import json
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from shared_specs.app.demo import contexts, document_picture
from shared_specs.app.demo import report as demo_report
from shared_specs.app.demo import run as demo
from shared_specs.app.demo.contexts import VARIANTS
from shared_specs.app.demo.report import Result, Run, largest_difference, picture, record, table, verdict
from shared_specs.app.finetune.log import RunLog
from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.progress import show_bytes
from shared_specs.tolerances import DEMO_LOSS_RTOL, FLOOR
from tests.pictures import assert_shows, bars, curves, saved_figures
from tests.tiny_model import tiny_config

GIB = 2**30
BEFORE = GIB // 2


def result(label, losses, tokens=64, long=False, variant=None):
    steps = [
        {"step": i + 1, "loss": loss, "seconds": 2.0, "tokens_per_second": tokens / 2, "peak_bytes": (i + 1) * GIB}
        for i, loss in enumerate(losses)
    ]
    start = {"config": tiny_config(), "options": {"tokens": tokens, "batch": 1}, "bytes_before_model": BEFORE}
    return Result(
        run=Run(label=label, package="p", flags=("--x",), long=long, variant=variant), start=start, steps=steps
    )


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
    """Losses as curves; memory against context: a curve for each variant and on it the points that were measured."""
    figures, path = saved_figures(monkeypatch), tmp_path / "demo.png"
    for module in (demo_report, contexts):
        monkeypatch.setattr(module, "machine_bytes", lambda: 40 * GIB)
    runs = [
        result("torch, plain", [2.5, 2.25], tokens=1024, variant="plain"),
        result("torch, tiled", [2.625, 2.375, 2.0]),
    ]
    runs.append(result("torch, block", [1.75], tokens=8192, long=True, variant="block-tiled"))
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, head_dim=64, vocab_size=49152)
    config = tiny_config(num_attention_heads=9, num_key_value_heads=3, **sizes)
    for run in runs:
        run.start["config"] = config
    picture(runs, path)
    loss, memory = figures[0].axes
    assert curves(loss) == {"torch, plain": [(1, 2.5), (2, 2.25)], "torch, tiled": [(1, 2.625), (2, 2.375), (3, 2.0)]}
    drawn = curves(memory)
    assert drawn["plain, measured"] == [(1024, 1)]  # of the first step
    assert drawn["block-tiled, measured"] == [(8192, 1)]
    assert "checkpointed, measured" not in drawn
    step = plain_step(config, 1024)
    first = step.weights + step.activations + 3 * step.logits  # no moments yet
    assert drawn["plain, predicted"][0] == (1024, (BEFORE + first) / GIB)
    assert [tokens for tokens, _ in drawn["checkpointed, predicted"]] == list(contexts.CURVE_TOKENS)
    assert drawn["memory of this machine"] == [(0, 40), (1, 40)]
    assert_shows(path, figures[0], covered=("checkpointed, predicted", "tiled, predicted"))  # in short contexts


@pytest.mark.deep
def test_picture_of_long_runs(tmp_path, monkeypatch):
    figures, path = saved_figures(monkeypatch), tmp_path / "demo.png"
    monkeypatch.setattr(demo_report, "machine_bytes", lambda: 2.75 * GIB)
    picture([result("torch, long", [1.75], tokens=10**5, long=True)], path)
    (memory,) = figures[0].axes
    predicted = (BEFORE + plain_step(tiny_config(), 10**5).peak) / GIB
    assert bars(memory) == {"torch, long\n100000 tokens": 1, "plain, predicted\n100000 tokens": predicted}
    assert curves(memory) == {"memory of this machine": [(2.75, 0), (2.75, 1)]}
    assert_shows(path, figures[0])


def test_each_lever_takes_less_of_a_long_context():
    """The order of the curves at their end, in bytes of the same model."""
    last = [how.model_bytes(tiny_config(), contexts.CURVE_TOKENS[-1]) for how in contexts.VARIANTS.values()]
    assert last == sorted(last, reverse=True)
    assert len(set(last)) == len(last)


def test_record():
    runs = [result("torch, plain", [2.5, 2.25]), result("torch, long", [1.75], long=True)]
    written = json.loads(json.dumps(record("demo", runs, 12.0)))
    assert written["kind"] == "demo"
    assert written["hardware"]["memory_bytes"]
    assert [row["losses"] for row in written["results"]] == [run.losses for run in runs]
    assert [row["first_step_peak_bytes"] for row in written["results"]] == [GIB, GIB]
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
        assert options["--save-every"] == "0"  # two gigabytes a run that nobody asked to keep
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


def test_demo_runs_four_and_then_longer_contexts(processes, tmp_path, capsys):
    assert demo.main([]) == 0
    ran = [(words[2], "--plain" in words, words[words.index("--tokens") + 1]) for words in processes[0]]
    assert ran == [
        ("tiled_torch", True, "1024"),
        ("tiled_torch", False, "1024"),
        ("tiled_jax", True, "1024"),
        ("tiled_jax", False, "1024"),
        ("tiled_torch", True, "2048"),
        ("tiled_torch", True, "3072"),
        ("tiled_torch", False, "3072"),
        ("tiled_torch", False, "3072"),
        ("tiled_torch", False, "6144"),
    ]
    assert sum("--checkpointing" in words for words in processes[0]) == 2
    assert sum("block" in words for words in processes[0]) == 2
    assert sorted(path.name for path in (tmp_path / "out" / "demo").iterdir()) == ["demo.json", "demo.png"]
    out = capsys.readouterr().out
    assert "within the tolerance" in out
    assert f"PyTorch block-tiled: one step on {demo.LONG_TOKENS} tokens in 1 s" in out


def test_demo_long_runs_both_halves(processes, tmp_path):
    assert demo.main(["--long"]) == 0
    assert [(words[2], "--rope-scale" in words) for words in processes[0]] == [
        ("tiled_torch", True),
        ("tiled_jax", True),
    ]
    assert sorted(path.name for path in (tmp_path / "out" / "demo").iterdir()) == ["demo-long.json", "demo-long.png"]


def test_demo_fails_when_losses_differ(processes, capsys):
    processes[1]["tiled_jax"] = [3.0, 2.01, 1.0]
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


def test_the_picture_of_the_documents(tmp_path, monkeypatch):
    """Its points are first steps: newer records have their peak, older ones that of runs of one step."""
    config = document_picture.model_config()
    plain = VARIANTS["plain"].model_bytes(config, 1024)
    two, one, predicted = [1.0, 1.0], [1.0], "first_step_bytes_predicted"
    runs = [
        {"label": "PyTorch plain", "tokens": 1024, "losses": two, "peak_bytes": 9, predicted: plain + 5},
        {"label": "PyTorch tiled", "tokens": 1024, "losses": two, "peak_bytes": 9, predicted: None},
        {"label": "PyTorch tiled", "tokens": 4096, "losses": one, "peak_bytes": 2**31, "peak_bytes_predicted": 7},
        {"label": "JAX plain", "tokens": 1024, "losses": one, "peak_bytes": 8},
    ]
    record = {
        "kind": "demo",
        "half": "demo",
        "date": "d",
        "versions": {},
        "hardware": {"memory_bytes": 2**34},
        "results": runs,
    }
    older = document_picture.data_of([record])
    tiled = {"variant": "tiled", "tokens": 4096, "peak_bytes": 2**31}
    assert older == {"record": "d", "machine_bytes": 2**34, "before": 5, "points": [tiled]}
    runs[0]["first_step_peak_bytes"] = 2**32
    data = document_picture.data_of([record])
    assert data["points"] == [{"variant": "plain", "tokens": 1024, "peak_bytes": 2**32}, tiled]

    figures, path = saved_figures(monkeypatch), tmp_path / "images" / "memory.png"
    document_picture.draw(data, path)
    drawn = curves(figures[0].axes[0])
    assert drawn["plain, measured"] == [(1024, 4)]
    assert drawn["tiled, measured"] == [(4096, 2)]
    assert drawn["memory of the machine"][0][1] == 16
    with Image.open(path) as shown:
        assert json.loads(shown.text[document_picture.DATA]) == data
    with pytest.raises(ValueError, match=r"^document_picture: a record of the demo must be there, got none"):
        document_picture.data_of([])

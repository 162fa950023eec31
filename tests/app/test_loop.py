"""The training loop with a trainer that needs no framework: what it leaves behind, and how it goes on."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from shared_specs.app.command import main
from shared_specs.app.data.batches import IGNORED
from shared_specs.app.finetune.checkpoint import load_checkpoint
from shared_specs.app.finetune.log import LOG_NAME, read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, PLOT_NAME, finetune
from shared_specs.app.finetune.processes import Alone
from shared_specs.app.memory import machine_bytes
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.tolerances import FLOOR
from tests.fake_trainer import COMMAND, FakeTrainer
from tests.tiny_model import write_inputs

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model and a text that no test writes to."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def options(inputs, tmp_path):
    """Options of a small run, with changes."""

    def make(**changes):
        base = {"model": str(inputs / "model"), "text": str(inputs / "text"), "tokens": 32, "steps": STEPS, "batch": 2}
        return FinetuneOptions(**base | {"lr": 1e-3, "out": str(tmp_path / "run"), "save_every": 2} | changes)

    return make


def run(options, **attributes):
    """The exit code and what was shown."""
    trainer, shown = FakeTrainer(), io.StringIO()
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return finetune(trainer, options, Console(file=shown, width=200)), shown.getvalue()


def losses(out):
    return [record["loss"] for record in step_records(read_log(Path(out)))]


def contents(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_a_run_leaves(options, tmp_path):
    code, shown = run(options())
    out = tmp_path / "run"
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", LOG_NAME, MODEL_NAME, PLOT_NAME]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]
    for step in range(1, STEPS + 1):
        assert f"step {step}/{STEPS}  loss " in shown
    assert "tokens/s" in shown
    assert "peak" in shown
    assert "left" in shown


def test_a_run_that_saves_nothing(options, tmp_path, monkeypatch):
    """No checkpoint and no model, at the end or on a signal; no disk is too small, and the losses are those of any run."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: (100, 99, 1))
    code, shown = run(options(save_every=0))
    out = tmp_path / "run"
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == [LOG_NAME, PLOT_NAME]
    assert f"\nlog and plot are in {out}" in shown
    with pytest.raises(InputError, match=r"must have .* of room"):
        run(options(out=str(tmp_path / "saving")))
    monkeypatch.undo()
    run(options(out=str(tmp_path / "saving")))
    assert losses(out) == losses(tmp_path / "saving")

    class Stopped(FakeTrainer):
        def step(self, batch):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().step(batch)

    shown = io.StringIO()
    code = finetune(Stopped(), options(save_every=0, out=str(tmp_path / "stopped")), Console(file=shown, width=200))
    assert code == 128 + signal.SIGTERM
    assert "stopped after step 1; no checkpoint was written (--save-every 0)" in shown.getvalue()
    assert not (tmp_path / "stopped" / "checkpoints").exists()


def test_live_display_on_a_terminal(options):
    shown = io.StringIO()
    finetune(FakeTrainer(), options(), Console(file=shown, width=200, force_terminal=True, color_system=None))
    for words in (f"{STEPS}/{STEPS}", "loss ", "tokens/s", "peak ", "left"):
        assert words in shown.getvalue()
    assert "\x1b[2K" in shown.getvalue()  # one line, drawn over and over


def test_log(options, tmp_path):
    run(options())
    start, *steps, end = read_log(tmp_path / "run")
    assert start["event"] == "start"
    assert start["options"]["tokens"] == 32
    assert start["versions"]["fake"] == "1"
    assert 2**20 < start["bytes_before_model"] < machine_bytes()
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert record["peak_bytes"] > 2**20
        assert record["tokens_per_second"] == pytest.approx(64 / record["seconds"], rel=FLOOR["float64"])
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    assert end == {"event": "end", "step": STEPS, "signal": None}


def test_saved_model_is_the_trained_one(options, tmp_path):
    run(options(rope_scale=2.0))
    saved = read_model(tmp_path / "run" / MODEL_NAME)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert saved.config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert (
        saved.tokenizer.encode("the sun").tolist() == read_model(options().model).tokenizer.encode("the sun").tolist()
    )
    for name, weight in saved.tensors.items():
        np.testing.assert_array_equal(weight, checkpoint.state.weights[name])
    before = read_model(options().model).tensors["model.embed_tokens.weight"]
    assert not np.array_equal(saved.tensors["model.embed_tokens.weight"], before)


@pytest.mark.parametrize("first", [1, 2, 5])
def test_resumed_run_is_the_uninterrupted_one(options, tmp_path, first):
    run(options(out=str(tmp_path / "whole")))
    run(options(steps=first))
    code, shown = run(options(resume=True))
    assert code == 0
    assert f"steps {first + 1} to {STEPS}" in shown
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    models = [load_file(tmp_path / name / MODEL_NAME / "model.safetensors") for name in ("run", "whole")]
    for name in models[0]:
        np.testing.assert_array_equal(models[0][name], models[1][name])
    assert [record["event"] for record in read_log(tmp_path / "run")].count("resume") == 1


def test_finished_run_resumes_to_itself(options, tmp_path):
    run(options())
    before = contents(tmp_path / "run" / MODEL_NAME)
    assert run(options(resume=True))[0] == 0
    assert contents(tmp_path / "run" / MODEL_NAME) == before


def test_options_that_change_no_loss_may_change_on_resume(options, tmp_path):
    run(options(steps=2))
    assert run(options(resume=True, plain=True, checkpointing=True, save_every=1))[0] == 0
    assert len(losses(tmp_path / "run")) == STEPS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 16}, "--tokens must be 32, as the run in .* began, got 16"),
        ({"batch": 1}, "--batch must be 2"),
        ({"lr": 0.5}, "--lr must be 0.001"),
        ({"seed": 1}, "--seed must be 0"),
        ({"dtype": "bfloat16"}, "--dtype must be float32"),
        ({"rope_scale": 2.0}, "--rope-scale must be None"),
        ({"text": None}, "--text must be the text that the run in .* began with"),
        ({"steps": 1}, "--steps must be >= 2"),
    ],
)
def test_resume_refuses_another_run(options, tmp_path, changes, words):
    run(options(steps=2))
    before = contents(tmp_path)
    with pytest.raises(InputError, match=f"^finetune: {words}"):
        run(options(**{"resume": True} | changes))
    assert contents(tmp_path) == before


def damage(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))


DAMAGES = {
    "a bit of the weights": lambda f: damage(f / "model.safetensors", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]),
    "a bit of the optimizer": lambda f: damage(
        f / "optimizer.safetensors", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]
    ),
    "half the weights": lambda f: damage(f / "model.safetensors", lambda b: b[: len(b) // 2]),
    "no optimizer": lambda f: (f / "optimizer.safetensors").unlink(),
    "another step": lambda f: damage(f / "run.json", lambda b: b.replace(b'"step": 2', b'"step": 1')),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "an empty manifest": lambda f: (f / "manifest.json").write_text("{}"),
    "half a manifest": lambda f: damage(f / "manifest.json", lambda b: b[:20]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_refused(options, tmp_path, name):
    run(options(steps=2))
    DAMAGES[name](tmp_path / "run" / "checkpoints" / "step-00000002")
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"^finetune: --resume found a damaged checkpoint, .*step-00000002"):
        run(options(resume=True))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder with a file"])
def test_output_that_exists_is_left_alone(options, tmp_path, kind):
    out = tmp_path / "run"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"^finetune: --out must be a new or empty folder"):
        run(options())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["below a file", "a link to nothing", "may not be written", "name too long"])
def test_output_that_cannot_be_made_is_refused_before_the_model(options, tmp_path, monkeypatch, kind):
    out, words = {
        "below a file": (tmp_path / "file" / "runs" / "run", "file is no folder"),
        "a link to nothing": (tmp_path / "link", "link is no folder"),
        "may not be written": (tmp_path / "locked" / "runs" / "run", "locked may not be written to"),
        "name too long": (tmp_path / ("x" * 300), "File name too long"),
    }[kind]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "locked").mkdir(mode=0o500)
    # To the superuser nothing is locked.
    monkeypatch.setattr("shared_specs.app.output.os.access", lambda path, mode: Path(path).name != "locked")
    before = contents(tmp_path)
    for resume in (False, True):
        with pytest.raises(InputError, match=rf"^finetune: --out must be a folder that can be made, .*{words}"):
            run(options(out=str(out), model="nowhere", resume=resume))
    assert contents(tmp_path) == before


def test_empty_output_folder_is_taken(options, tmp_path):
    (tmp_path / "run").mkdir()
    assert run(options())[0] == 0


def test_resume_of_nothing_is_refused(options, tmp_path):
    with pytest.raises(InputError, match=r"^finetune: --out .* holds no run"):
        run(options(resume=True))
    assert not (tmp_path / "run").exists()


def test_bad_input_writes_nothing(options, tmp_path):
    for changes in ({"model": "nowhere"}, {"text": "nowhere"}, {"tokens": 65}, {"tokens": 6000, "rope_scale": 100.0}):
        with pytest.raises(InputError):
            run(options(**changes))
    assert list(tmp_path.iterdir()) == []


def test_budget_below_the_shortest_shard_writes_nothing(options, tmp_path):
    least = 5 * 64 * 4  # gate, up, dh and two temporaries of one token; its logits are fewer bytes
    words = rf"finetune: --memory-budget must be >= {least} bytes, what the shortest shard of a tiled layer takes, got"
    for budget in (10, least - 1):
        with pytest.raises(InputError, match=f"^{words} {budget}\\."):
            run(options(memory_budget=budget))
    assert list(tmp_path.iterdir()) == []
    assert run(options(memory_budget=least, steps=2))[0] == 0
    before = contents(tmp_path)
    with pytest.raises(InputError, match=words):
        run(options(memory_budget=10, resume=True))
    assert contents(tmp_path) == before


def test_bad_input_is_no_lost_process(options):
    """Whatever words it has: a path may be called after what connects processes."""

    class Suspicious(Alone):
        def lost(self, error):
            return str(error)

    with pytest.raises(InputError, match=r"--text must be a text file, got igloo"):
        run(options(text="igloo"), join=lambda _: Suspicious())


def test_a_launcher_that_ends_this_process_waits_for_what_it_says(options, capsys):
    """torchrun kills the others as soon as it sees one fail, which may be before they have said what they lost."""

    class Left(Alone):
        def gather(self, value):
            log = Path(options().out) / LOG_NAME
            if log.exists() and len(losses(log.parent)) == 3:
                raise ConnectionError("closed by peer")
            return [value]

        def lost(self, error):
            os.kill(os.getpid(), signal.SIGTERM)
            return str(error)

    before = signal.getsignal(signal.SIGTERM)
    assert run(options(), join=lambda _: Left())[0] == 1
    assert (
        "process 0 of 1 lost another one, and the run ends: closed by peer. The last checkpoint is"
        in capsys.readouterr().err
    )
    assert signal.getsignal(signal.SIGTERM) is before


def test_context_beyond_the_positions_needs_scaling(options):
    with pytest.raises(InputError, match=r"--tokens must be <= 64, .* Pass --rope-scale 2"):
        run(options(tokens=100))
    assert run(options(tokens=100, rope_scale=2.0))[0] == 0


def test_diverged_run_stops_and_keeps_the_checkpoint_before(options, tmp_path):
    code, shown = run(options(), diverge_at=4)
    assert code == 1
    assert "the loss of step 4 is nan" in shown
    assert load_checkpoint(tmp_path / "run").record["step"] == 2
    assert len(losses(tmp_path / "run")) == 3
    assert run(options(resume=True))[0] == 0
    assert len(losses(tmp_path / "run")) == STEPS


def test_torn_log_line_is_survived(options, tmp_path):
    run(options(steps=2))
    with (tmp_path / "run" / LOG_NAME).open("a") as log:
        log.write('{"event": "step", "st')
    run(options(resume=True))
    assert len(losses(tmp_path / "run")) == STEPS
    assert read_log(tmp_path / "run")[-1]["event"] == "end"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\n", "it is not UTF-8 text"),
        (b"[1]\n", "line {line} is no record"),
        (b"7\n", "line {line} is no record"),
        (b'{"step": 1}\n', "line {line} is no record"),
    ],
    ids=["not text", "a list", "a number", "no event"],
)
def test_damaged_log_is_refused(options, tmp_path, content, words):
    run(options(steps=2))
    log = tmp_path / "run" / LOG_NAME
    words = words.format(line=log.read_text().count("\n") + 1)
    log.write_bytes(log.read_bytes() + content)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=rf"^finetune: --out .* holds a damaged {LOG_NAME}: {words}\. Start again"):
        run(options(resume=True))
    assert contents(tmp_path) == before


def command(options):
    """The command's words that say these options."""
    words = ["finetune"]
    for name in ("model", "text", "tokens", "steps", "batch", "lr", "memory_budget", "rope_scale", "out", "save_every"):
        if getattr(options, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return [*words, "--resume"] if options.resume else words


def start(options, step_seconds=0.1):
    """A process that has finished at least three steps."""
    environment = os.environ | {"FAKE_STEP_SECONDS": str(step_seconds)}
    with Path(options.out).with_name("stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_trainer", *command(options)], cwd=ROOT, env=environment, stderr=stderr
        )
    deadline = time.monotonic() + 60
    log = Path(options.out) / LOG_NAME
    while not log.exists() or len(losses(options.out)) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_resumes_with_the_same_losses(options, tmp_path, number):
    steps = 12
    run(options(out=str(tmp_path / "whole"), steps=steps))
    process = start(options(steps=steps, out=str(tmp_path / "run")))
    process.send_signal(number)
    assert process.wait(30) == (-9 if number == signal.SIGKILL else 128 + number)
    assert (tmp_path / "stderr").read_text() == ""
    done = len(losses(tmp_path / "run"))
    assert done < steps
    checkpoint = load_checkpoint(tmp_path / "run")
    # A signal that can be answered loses nothing; a kill goes back to the newest multiple of --save-every.
    assert checkpoint.record["step"] == (done if number != signal.SIGKILL else done - done % 2)
    assert read_model(checkpoint.folder).tensors.keys() == checkpoint.state.weights.keys()
    assert not (tmp_path / "run" / MODEL_NAME).exists()
    assert run(options(steps=steps, resume=True))[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert (tmp_path / "run" / MODEL_NAME).exists()


def test_second_signal_ends_at_once(options):
    process = start(options(steps=500), step_seconds=0.4)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    assert load_checkpoint(Path(options().out)) is not None


def test_killed_before_the_first_checkpoint_begins_again(options, tmp_path):
    run(options(out=str(tmp_path / "whole")))
    process = start(options(save_every=100, steps=100), step_seconds=0.05)
    process.kill()
    process.wait(30)
    assert load_checkpoint(tmp_path / "run") is None
    assert run(options(resume=True))[0] == 0
    assert losses(tmp_path / "run")[:STEPS] == losses(tmp_path / "whole")


def test_killed_while_saving_leaves_the_checkpoint_before(options, tmp_path, monkeypatch):
    run(options(steps=2))

    class Killed(BaseException):
        pass

    def die(*_arguments):
        raise Killed

    monkeypatch.setattr("shared_specs.app.finetune.checkpoint._digests", die)
    run_on = options(resume=True)
    monkeypatch.setattr("shared_specs.app.finetune.checkpoint._verify", lambda folder: None)
    with pytest.raises(Killed):
        run(run_on)
    monkeypatch.undo()
    partial = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if "partial" in path.name]
    assert partial == [".partial-step-00000004"]
    assert load_checkpoint(tmp_path / "run").record["step"] == 2
    assert run(options(resume=True))[0] == 0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "none"}, "finetune: --text must be a text file"),
        ({"out": __file__ + "/run"}, "finetune: --out must be a folder that can be made"),
        ({"memory_budget": 10}, "finetune: --memory-budget must be >= 1280 bytes"),
        ({"rope_scale": 1e300}, "finetune: --rope-scale must be between 1 and 1024"),
    ],
    ids=["text", "out", "budget", "scale"],
)
def test_bad_input_on_the_command_line(options, tmp_path, capsys, changes, words):
    assert main("fake", [COMMAND], command(options(**changes))) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(words)
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_records_are_strict_json(options, tmp_path):
    run(options(), diverge_at=3)

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "run" / LOG_NAME).read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_what_is_held_out_is_never_trained_on_and_told_once_each(options):
    """Of a text, its last part, every token but the first predicted once, whatever the batch."""
    from shared_specs.app.finetune.run_inputs import prepare

    whole = prepare(options()).data
    for batch in (2, 3):
        job = prepare(options(eval_fraction=0.3, batch=batch))
        held, trained = job.held_out, job.data
        told = [pair for each in held.batches(batch) for pair in zip(each.input_ids, each.shift_labels, strict=True)]
        labels = np.concatenate([row[row != IGNORED] for _, row in told])
        tail = whole.ids[len(trained.ids) :]
        np.testing.assert_array_equal(labels, tail[1:])
        np.testing.assert_array_equal(np.concatenate([ids[row != IGNORED] for ids, row in told]), tail[:-1])
        assert len(tail) == round(0.3 * len(whole.ids))
        np.testing.assert_array_equal(trained.ids, whole.ids[: len(trained.ids)])
        assert job.digest == prepare(options()).digest, "another text is another one, wherever it differs"


def test_packed_rows_are_held_out_by_the_seed(options):
    from shared_specs.app.finetune.run_inputs import prepare

    def rows(job):
        return {row.tobytes() for batch in job.held_out.batches(2) for row in batch.input_ids if row.any()}

    first, again, other = (prepare(options(pack=True, eval_fraction=0.3, seed=seed)) for seed in (0, 0, 1))
    assert rows(first) == rows(again) != rows(other)
    trained = {row.tobytes() for step in range(len(first.data.rows)) for row in first.data.at(step, 2).input_ids}
    assert trained.isdisjoint(rows(first))
    assert len(first.data.rows) + first.held_out.rows == len(prepare(options(pack=True)).data.rows)


def test_an_infinite_gradient_ends_the_run_before_it_is_saved(options, tmp_path):
    """The loss of its step is a number still; weights that have none would be saved."""
    code, shown = run(options(save_every=1), gradient_norm=float("inf"))
    assert code == 1
    assert "the gradient norm of step 1 is inf: training diverged" in shown
    assert load_checkpoint(tmp_path / "run") is None

"""The folder of a run: refused before the model where nothing can be written, and nothing lost where the disk fills up."""

import errno
import io
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from shared_specs.app.finetune.checkpoint import load_checkpoint
from shared_specs.app.finetune.log import LOG_NAME, read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.finetune.processes import OutputError
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.app.output import check_records
from shared_specs.app.progress import RunProgress
from tests.fake_trainer import FakeTrainer
from tests.synced import Renames, assert_synced_before_the_name
from tests.tiny_model import write_inputs

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def options(inputs, tmp_path):
    def make(**changes):
        base = {"model": str(inputs / "model"), "text": str(inputs / "text"), "tokens": 32, "steps": STEPS, "batch": 2}
        return FinetuneOptions(**base | {"lr": 1e-3, "out": str(tmp_path / "run"), "save_every": 2} | changes)

    return make


def run(options, trainer=None):
    return finetune(trainer or FakeTrainer(), options, Console(file=io.StringIO()))


def losses(out):
    return [record["loss"] for record in step_records(read_log(Path(out)))]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Calls(FakeTrainer):
    """Calls something before its step `at`; the loop is not told."""

    def __init__(self, at, call):
        self.at, self.call = at, call

    def step(self, batch):
        if self.steps + 1 == self.at:
            self.call()
        return super().step(batch)


class Unloaded(FakeTrainer):
    def load(self, config, weights, options):
        raise AssertionError("the model is loaded")


@contextmanager
def limits_kept():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_more_than(size):
    """From now on the kernel refuses longer files, as it would on a full disk, whoever writes them."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("what", ["log", "checkpoint", "sync", "plot"])
def test_a_full_disk_loses_nothing(options, tmp_path, monkeypatch, what):
    def full(*_arguments, **_others):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    call, reason, kept = {
        "log": (lambda: no_more_than(100), "File too large", 2),
        "checkpoint": (lambda: no_more_than(30_000), "File too large", 2),
        "sync": (lambda: monkeypatch.setattr(os, "fsync", full), "No space left on device", 2),
        "plot": (lambda: monkeypatch.setattr("shared_specs.app.plots.os.replace", full), "No space left on device", 4),
    }[what]
    run(options(out=str(tmp_path / "whole")))
    with limits_kept(), pytest.raises(OutputError) as caught:
        run(options(), Calls(3, call))
    monkeypatch.undo()
    text = str(caught.value)
    assert text.startswith(f"finetune: --out cannot be written to: {reason} ({tmp_path / 'run'}")
    kept_folder = tmp_path / "run" / "checkpoints" / f"step-{kept:08d}"
    assert text.endswith(f"The last checkpoint is {kept_folder}; --resume continues.")
    assert "\n" not in text
    assert load_checkpoint(tmp_path / "run").record["step"] == kept
    assert list((tmp_path / "run").rglob("*partial*")) == []
    assert run(options(resume=True)) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_disk_without_room_is_refused_before_the_model(options, tmp_path, monkeypatch):
    usage = {"free": 10**6}
    monkeypatch.setattr("shutil.disk_usage", lambda path: (10**9, 10**9 - usage["free"], usage["free"]))
    assert run(options()) == 0
    usage["free"] = 1000
    for given in (options(out=str(tmp_path / "other" / "run")), options(resume=True, steps=STEPS + 1)):
        before = contents(tmp_path)
        with pytest.raises(InputError, match=r"^finetune: --out must have \d+ bytes of room .*, got 1000 bytes \("):
            run(given, Unloaded())
        assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["/proc/x", "a folder of a read-only disk"])
def test_a_folder_that_only_looks_writable_is_refused_before_the_model(options, tmp_path, monkeypatch, place):
    if place == "/proc/x":
        if not Path(place).parent.is_dir():
            pytest.skip("no such place on this system")
        out = place
    else:
        out = str(tmp_path / "run")

        def refuse(**_others):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr("shared_specs.app.output.tempfile.TemporaryDirectory", refuse)
    with pytest.raises(InputError, match=rf"^finetune: --out must be a folder that can be made, got {out}: .* Pass"):
        run(options(out=out), Unloaded())
    assert list(tmp_path.iterdir()) == []


def test_an_absurd_batch_is_refused_before_it_is_cut(options, tmp_path, monkeypatch):
    monkeypatch.setattr("shared_specs.app.data.text.Windows.batch", lambda *_: pytest.fail("windows are cut"))
    with pytest.raises(InputError, match=r"^finetune: --batch must be <= \d+, the sequences .*, got 10000000000\.$"):
        run(options(batch=10**10), Unloaded())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_record_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"^bench: --out must be a folder that can be made, got .*no folder\. Pass"):
        check_records(str(tmp_path / place))
    check_records(str(tmp_path / "new" / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Killed(BaseException):
    """What nothing answers."""


def kill():
    raise Killed


def killed_before_its_first_checkpoint(options):
    with pytest.raises(Killed):
        run(options(save_every=100), Calls(3, kill))
    assert load_checkpoint(Path(options().out)) is None


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
    ],
)
def test_another_run_is_refused_before_the_first_checkpoint_too(options, tmp_path, changes, words):
    killed_before_its_first_checkpoint(options)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=f"^finetune: {words}"):
        run(options(**{"resume": True} | changes), Unloaded())
    assert contents(tmp_path) == before


def test_a_log_that_does_not_say_how_it_began_is_refused(options, tmp_path):
    killed_before_its_first_checkpoint(options)
    log = tmp_path / "run" / LOG_NAME
    whole = log.read_text()
    log.write_text('{"event": "step", "loss": 1.0, "step": 1}\n')
    with pytest.raises(InputError, match=r"holds a damaged log\.jsonl: its first record is not that of a beginning"):
        run(options(resume=True))
    log.write_text(whole[:50])  # killed while it said so: nothing was done
    assert run(options(resume=True)) == 0


def test_files_are_on_the_disk_before_their_folder_has_its_name(options, tmp_path, monkeypatch):
    renames = Renames(monkeypatch)
    assert run(options()) == 0
    steps = [tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (2, 4, 6)]
    assert_synced_before_the_name(renames, *steps, tmp_path / "run" / MODEL_NAME)
    assert renames.unsynced.keys() == {*map(str, steps), str(tmp_path / "run" / MODEL_NAME)}


def test_files_that_nobody_synced_are_found(tmp_path, monkeypatch):
    renames = Renames(monkeypatch)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("a")
    (tmp_path / "new").rename(tmp_path / "named")
    assert sorted(renames.unsynced[str(tmp_path / "named")]) == [".", "file"]
    assert renames.parents_after == []


class Closed(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_whose_lines_nobody_reads_goes_on_and_says_so(options, tmp_path, capsys):
    assert finetune(FakeTrainer(), options(), Console(file=Closed())) == 0
    words = "finetune: its lines cannot be shown (No space left on device); the run goes on, see its log.\n"
    assert capsys.readouterr().err == words
    assert len(losses(tmp_path / "run")) == STEPS


def test_a_closed_pipe_does_not_end_the_run(monkeypatch, capsys):
    progress = RunProgress(1, 0, Console(file=io.StringIO()))
    monkeypatch.setattr(progress._console, "print", lambda *_, **__: exit(1))  # as rich answers
    progress.say("a line")
    assert "its lines cannot be shown (the pipe is closed)" in capsys.readouterr().err

"""Several processes of one run, here threads: who speaks about bad input, and who writes which part of a checkpoint."""

import errno
import io
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shared_specs.app.finetune import processes as team
from shared_specs.app.finetune.checkpoint import load_checkpoint, save_sharded_checkpoint
from shared_specs.app.finetune.context import check_context
from shared_specs.app.finetune.loop import finetune
from shared_specs.app.finetune.processes import (
    OutputError,
    SaidElsewhere,
    check_layout,
    end_alone,
    layout,
    let_first_speak,
    succeed_everywhere,
)
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import UnsupportedError
from tests.fake_trainer import FakeTrainer
from tests.tiny_model import write_text, write_tiny_folder


class Threads:
    """A team whose processes are threads."""

    def __init__(self, rank, count, barrier, board):
        self.rank, self.count, self._barrier, self._board = rank, count, barrier, board

    def gather(self, value):
        self._board[self.rank] = value
        self._barrier.wait()
        found = [self._board[rank] for rank in range(self.count)]
        self._barrier.wait()
        return found

    def lost(self, error):
        return None


def together(work, count=2):
    """What work(team) returns, or raises, in each thread."""
    barrier, board, found = threading.Barrier(count, timeout=30), {}, [None] * count

    def run(rank):
        try:
            found[rank] = work(Threads(rank, count, barrier, board))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def fails_on(ranks):
    def work(team):
        def step():
            if team.rank in ranks:
                raise InputError(f"finetune: bad on {team.rank}.")
            return team.rank

        return succeed_everywhere(team, step)

    return together(work, 3)


def test_agreement():
    assert fails_on([]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "words"), [([0, 1, 2], "finetune: bad on 0."), ([2], "finetune: bad on 2. (process 2 of 3)")]
)
def test_bad_input_anywhere_ends_all_and_one_speaks(ranks, words):
    first, *others = fails_on(ranks)
    assert (type(first), str(first)) == (InputError, words)
    assert [type(error) for error in others] == [SaidElsewhere] * 2


def test_one_process_of_torchrun_speaks_first(monkeypatch):
    waited = []
    monkeypatch.setattr(team.time, "sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    let_first_speak()
    monkeypatch.setenv("RANK", "0")
    let_first_speak()
    assert not waited
    monkeypatch.setenv("RANK", "1")
    let_first_speak()
    assert waited == [30]


class Ended(BaseException):
    """os._exit, where a test looks on."""


@pytest.mark.parametrize(
    ("error", "lost", "code"),
    [
        (None, False, None),
        (InputError("mend it"), False, None),
        (UnsupportedError("not here"), False, None),
        (None, True, 1),
        (KeyError("my own fault"), False, 1),
        (KeyboardInterrupt(), False, 130),
    ],
    ids=str,
)
def test_who_fails_alone_says_why_and_ends_at_once(error, lost, code, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(team.os, "_exit", ended.append)
    try:
        if error is not None:
            raise error
    except BaseException:
        end_alone(lost)
    else:
        end_alone(lost)
    assert ended == ([] if code is None else [code])
    shown = capsys.readouterr().err
    assert ("KeyError: 'my own fault'" in shown) == (code == 1 and not lost)
    assert bool(shown) == (code == 1 and not lost)


def test_weights_that_one_process_cannot_read_are_told_by_the_first(tmp_path):
    """Of two processes with folders of their own the second has no weights; nobody is left waiting."""
    write_text(tmp_path / "text")
    for rank in range(2):
        write_tiny_folder(tmp_path / f"{rank}")
    (tmp_path / "1" / "model.safetensors").unlink()

    def work(team):
        trainer = FakeTrainer()
        trainer.join = lambda options: team
        given = {"model": str(tmp_path / f"{team.rank}"), "text": str(tmp_path / "text"), "out": str(tmp_path / "run")}
        return finetune(trainer, FinetuneOptions(**given, tokens=8), Console(file=io.StringIO()))

    first, second = together(work)
    assert type(second) is SaidElsewhere
    assert (
        str(first)
        == f"finetune: --model {tmp_path / '1'} has no model.safetensors. Only safetensors are read. (process 1 of 2)"
    )
    assert not (tmp_path / "run").exists()


def test_sharded_checkpoint_has_every_part_or_does_not_exist(tmp_path):
    def save(step):
        def work(team):
            def part(folder: Path):
                (folder / f"{team.rank}.part").write_text(str(step))

            def rest(folder: Path):
                (folder / "config.json").write_text("{}")

            return save_sharded_checkpoint(tmp_path, team, {"step": step}, "form", part, rest)

        return together(work)

    save(3)
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.record, checkpoint.state) == ({"step": 3, "shard_format": "form"}, None)
    assert sorted(path.name for path in checkpoint.shards.iterdir()) == ["0.part", "1.part"]
    manifest = json.loads((checkpoint.folder / "manifest.json").read_text())
    assert {"shards/0.part", "shards/1.part", "config.json", "run.json"} == set(manifest)
    (checkpoint.shards / "1.part").write_text("?")
    with pytest.raises(InputError, match=r"damaged checkpoint, .*shards/1.part is not what was written"):
        load_checkpoint(tmp_path)
    (checkpoint.shards / "1.part").write_text("3")
    record = (checkpoint.folder / "run.json").read_text()
    (checkpoint.folder / "run.json").write_text("{")
    for error in together(lambda team: load_checkpoint(tmp_path, team)):
        assert type(error) is InputError, "by who verifies and by who only reads"
        assert "damaged checkpoint" in str(error)
    (checkpoint.folder / "run.json").write_text(record)
    save(5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_full_disk_of_one_process_ends_all_and_keeps_the_checkpoint_before(tmp_path):
    def save(step, full=()):
        def work(team):
            def part(folder: Path):
                (folder / f"{team.rank}.part").write_text(str(step))
                if team.rank in full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            return save_sharded_checkpoint(tmp_path, team, {"step": step}, "form", part, lambda folder: None)

        return together(work)

    save(3)
    first, second = save(5, full=[1])
    place = tmp_path / "checkpoints"
    text = f"finetune: --out cannot be written to: No space left on device ({place}). (process 1 of 2)"
    assert (type(first), str(first)) == (OutputError, text)
    assert type(second) is SaidElsewhere
    assert [path.name for path in place.iterdir()] == ["step-00000003"], "and what was begun is gone"
    assert load_checkpoint(tmp_path).record["step"] == 3


def test_layout():
    check_layout(FinetuneOptions(dp=2, fsdp=2, cp=2, tp=2, batch=4), 16, "processes", "")
    with pytest.raises(InputError, match=r"must be 4, the processes of this run, got 2 x 1 x 1 x 1 = 2\. More\.$"):
        check_layout(FinetuneOptions(dp=2, batch=2), 4, "processes", "More.")


HEADS = 8
MEAN = {"loss_mean": "tokens"}


@pytest.mark.parametrize(
    ("ranks", "axes", "data"),
    [
        ({"dp": 2}, {"dp_shard": 2}, DataParallel(engine="ddp", **MEAN)),
        ({"fsdp": 4}, {"dp_shard": 4}, DataParallel(**MEAN)),
        ({"tp": 2}, {"tp": 2}, None),
        ({"cp": 2}, {"dp_shard": 1, "cp": 2}, DataParallel(context_axis="cp", **MEAN)),
        (
            {"cp": 2, "context": "ring"},
            {"dp_shard": 1, "cp": 2},
            DataParallel(context_axis="cp", context="ring", **MEAN),
        ),
        (
            {"cp": 12, "tp": 2, "context": "2d", "tokens": 48},  # four heads a rank of tp: groups of four
            {"dp_shard": 1, "ring": 3, "cp": 4, "tp": 2},
            DataParallel(context_axis=("ring", "cp"), context="2d", **MEAN),
        ),
        (
            {"dp": 2, "tp": 2},
            {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
            DataParallel(replicate_axis="dp_replicate", **MEAN),
        ),
        (
            {"dp": 2, "fsdp": 2, "cp": 2, "tp": 2},
            {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
            DataParallel(replicate_axis="dp_replicate", **MEAN, context_axis="cp"),
        ),
    ],
)
def test_axes_and_what_is_done_along_them(ranks, axes, data):
    options = FinetuneOptions(**{"batch": 4, "tokens": 32, "checkpointing": True} | ranks)
    found, config = layout(options, HEADS, compiled=True)
    assert list(found.items()) == list(axes.items())
    tensor = TensorParallel() if "tp" in ranks else None
    assert config == ParallelConfig(tensor=tensor, data=data, checkpointing=Checkpointing())
    assert layout(replace(options, checkpointing=False), HEADS, compiled=True)[1].checkpointing is None
    parts = [
        layout(replace(options, grad_accumulation=3), HEADS, compiled=each)[1].micro_batches for each in (True, False)
    ]
    assert parts == [3, 1]


@pytest.mark.parametrize(("compiled", "tokens", "split"), [(True, 9, False), (True, 10, True), (False, 9, True)])
def test_tokens_that_ranks_do_not_divide_stay_whole_where_parts_are_equal(compiled, tokens, split):
    _, config = layout(FinetuneOptions(tp=2, batch=1, tokens=tokens), HEADS, compiled=compiled)
    assert config.tensor == TensorParallel(sequence_parallel=split)


@pytest.mark.parametrize(
    ("ranks", "heads", "text"),
    [
        ({"cp": 4}, 8, "--context must be ulysses with this model and these ranks, got 2d. The 4 ranks of --cp divide the 8 h"),
        ({"cp": 4, "tp": 3}, 9, "got 2d. The 4 ranks of --cp and the 3 heads of a rank of --tp have no divisor in common."),
        ({"cp": 4, "tp": 1}, 9, "--context must be ring with this model and these ranks, got 2d. The 4 ranks of --cp and the"),
        ({"cp": 6}, 9, "--tokens must be a multiple of 12, got 30. The 2 places of a ring take two runs of as many tokens, wh"),
    ],
)  # fmt: skip
def test_rings_of_groups_that_would_be_one_or_the_other(ranks, heads, text):
    options = FinetuneOptions(**ranks, context="2d", tokens=30 if ranks["cp"] == 6 else 24)
    options.check()
    with pytest.raises(InputError, match=re.escape(text)):
        check_context({"num_attention_heads": heads}, options)
    check_context({"num_attention_heads": heads}, replace(options, context="ring"))

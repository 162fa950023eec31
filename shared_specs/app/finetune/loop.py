"""The fine-tuning loop of both halves: windows in, steps driven, everything logged, shown, saved and resumable."""

import dataclasses
import math
import platform
import sys
import time
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from shared_specs.app.finetune.budget import check_budget
from shared_specs.app.finetune.checkpoint import (
    newest_checkpoint,
    save_checkpoint,
    save_sharded_checkpoint,
    write_folder,
)
from shared_specs.app.finetune.log import NoLog, RunLog, read_log, step_records
from shared_specs.app.finetune.processes import USER_ERRORS, OutputError, Team, agreed
from shared_specs.app.finetune.run_inputs import RunInputs, prepare
from shared_specs.app.finetune.trainer import Trainer
from shared_specs.app.memory import PeakMemory, resident_bytes
from shared_specs.app.models.weights import write_config, write_model
from shared_specs.app.options import FinetuneOptions
from shared_specs.app.output import try_out, writing
from shared_specs.app.plots import plot_runs
from shared_specs.app.progress import RunProgress
from shared_specs.app.signals import StopRequest, exit_code

PLOT_NAME = "run.png"
MODEL_NAME = "model"


def finetune(trainer: Trainer, options: FinetuneOptions, console: Console | None = None) -> int:
    """Run (or resume) the fine-tuning that the options describe and return the process's exit code.

    Leaves in `--out`: `log.jsonl`, `run.png`, `checkpoints/step-N` (the newest) and, once all steps are done, `model`.
    Of several processes each calls this; process 0 shows and writes what is not in shards.

    Raises:
        InputError: something the user gave cannot be used; nothing was written. Or the disk is full: what was written
            before stays, and its last checkpoint can be resumed.
        UnsupportedError, SpecError: the half cannot train this model with these options; nothing was written.
    """
    options.check()
    team, stop = trainer.join(options), StopRequest()
    try:
        return _finetune(trainer, team, stop, options, console or Console(quiet=team.rank != 0))
    except OutputError as error:
        raise OutputError(f"{error} {_kept(options)}") from error
    except USER_ERRORS:
        raise
    except Exception as error:
        reason = team.lost(error)
        if reason is None:
            raise
        print(_lost(team, options, reason), file=sys.stderr, flush=True)
        return 1
    finally:
        stop.end()
        trainer.leave()


def _finetune(trainer: Trainer, team: Team, stop: StopRequest, options: FinetuneOptions, console: Console) -> int:
    job = agreed(team, lambda: _prepared(trainer, team, options))
    agreed(team, lambda: try_out(job.out))  # once every process has seen that the folder is empty
    before = resident_bytes()
    agreed(team, lambda: _load(trainer, job))  # a file may be damaged where one process reads it only
    log = agreed(team, writing(job.out, lambda: _opened_log(team, job.out)))
    try:
        header = _header(trainer, team, job) | {"bytes_before_model": before}
        agreed(team, writing(job.out, lambda: log.write("resume" if options.resume else "start", **header)))
        return _Run(trainer, team, job, log, console).run(stop)
    finally:
        log.close()


def _opened_log(team: Team, out: Path) -> RunLog | NoLog:
    if team.rank != 0:
        return NoLog()
    out.mkdir(parents=True, exist_ok=True)
    return RunLog(out)


def _prepared(trainer: Trainer, team: Team, options: FinetuneOptions) -> RunInputs:
    job = prepare(options, trainer.shard_format, team)
    if options.memory_budget is not None:
        check_budget(job.config, options, trainer.buffers(job.config, options))
    return job


def _load(trainer: Trainer, job: RunInputs) -> None:
    """The model, and where a run is resumed its state, are the trainer's from here on."""
    if job.checkpoint is None:
        trainer.load(job.config, job.files.weights, job.options)
    elif job.checkpoint.state is None:
        trainer.load(job.config, None, job.options)
        trainer.load_shards(job.checkpoint.shards)
    else:
        trainer.load(job.config, job.checkpoint.state.weights, job.options)
        trainer.load_state(job.checkpoint.state)


class _Run:
    """One process's part of a run."""

    def __init__(self, trainer: Trainer, team: Team, job: RunInputs, log: RunLog | NoLog, console: Console) -> None:
        self.trainer, self.team, self.job, self.log = trainer, team, job, log
        self.options = job.options
        self.saved = job.done if job.checkpoint else -1
        self.progress = RunProgress(job.options.steps, job.done, console)
        self.began = time.perf_counter()

    def run(self, stop: StopRequest) -> int:
        step, asked = self.job.done, None
        with self.progress, stop.listen(self.progress.say):
            self.progress.say(_summary(self.trainer, self.team, self.job))
            while step < self.options.steps and asked is None:
                loss = self._step(step)
                if not math.isfinite(loss):
                    return self._diverged(step + 1, loss)
                step += 1
                # A signal may have come to some processes only, or to one of them a step earlier.
                asked = next((signal for signal in self.team.gather(stop.signal) if signal is not None), None)
                if step % self.options.save_every == 0 and step < self.options.steps and asked is None:
                    self._save(step)
            self._save(step)
            if step == self.options.steps:
                self.progress.say(f"model, log and plot are in {self.job.out}")
            else:
                self.progress.say(f"stopped after step {step}; the same command with --resume continues")
            self._log("end", step=step, signal=asked)
        return exit_code(asked) if step < self.options.steps else 0

    def _log(self, event: str, **values: Any) -> None:
        agreed(self.team, writing(self.job.out, lambda: self.log.write(event, **values)))

    def _step(self, step: int) -> float:
        """Step `step`, counted from 0, measured and written down."""
        tokens = self.job.windows.batch(step, self.options.batch)
        start = time.perf_counter()
        with PeakMemory() as peak:
            loss = self.trainer.step(tokens)
        seconds = time.perf_counter() - start
        device_peak = self.trainer.peak_memory_bytes()
        record = {
            "step": step + 1,
            "loss": loss,
            "seconds": seconds,
            "tokens_per_second": self.options.batch * self.options.tokens / seconds,
            "peak_bytes": peak.bytes if device_peak is None else device_peak,
        }
        # JSON has no NaN; the text of it says more than a file that strict readers refuse.
        self._log("step", **record if math.isfinite(loss) else record | {"loss": str(loss)})
        if math.isfinite(loss):
            mean = (time.perf_counter() - self.began) / (step + 1 - self.job.done)
            self.progress.step(record, mean * (self.options.steps - step - 1))
        return loss

    def _save(self, step: int) -> None:
        """Write the checkpoint of `step`, the plot, and after the last step the model."""
        if step == 0:
            return
        job = self.job
        if step != self.saved and self.trainer.sharded:
            write_rest = partial(write_config, config=job.config, tokenizer=job.files.tokenizer)
            save_sharded_checkpoint(
                job.out, self.team, job.record(step), self.trainer.shard_format, self.trainer.save_shards, write_rest
            )
        elif step != self.saved:
            save_checkpoint(job.out, self.trainer.state(), job.record(step), job.config, job.files.tokenizer)
        self.saved = step
        agreed(self.team, writing(job.out, self._plot))
        if step == self.options.steps:
            write_folder(job.out / MODEL_NAME, self._write_model, self.team)

    def _plot(self) -> None:
        if self.team.rank == 0:
            plot_runs({self.trainer.name: step_records(read_log(self.job.out))}, self.job.out / PLOT_NAME)

    def _write_model(self, folder: Path) -> None:
        weights = iter(self.trainer.full_weights())
        try:
            if self.team.rank == 0:
                write_model(folder, self.job.config, weights, self.job.files.tokenizer)
        finally:
            for _ in weights:  # each is made by all processes together, also when this one cannot write it
                pass

    def _diverged(self, step: int, loss: float) -> int:
        """A loss that is no number ends the run; the checkpoint before it stays."""
        self._log("end", step=step, signal=None, diverged=True)
        self.progress.say(f"the loss of step {step} is {loss}: training diverged. Try a smaller --lr in a new --out.")
        return 1


def _summary(trainer: Trainer, team: Team, job: RunInputs) -> str:
    options = job.options
    tiling = "plain" if options.plain else "tiled"
    axes = " x ".join(f"{name} {getattr(options, name)}" for name in ("dp", "fsdp", "cp", "tp"))
    ranks = "" if options.ranks == 1 else f"{axes}, "
    ranks += "" if team.count == 1 else f"{team.count} processes, "
    return (
        f"{trainer.name} finetune: {job.files.source.name}, {options.batch} x {options.tokens} tokens, "
        f"{options.dtype}, {tiling}, {ranks}steps {job.done + 1} to {options.steps}, "
        f"text of {len(job.windows.ids)} tokens"
    )


def _lost(team: Team, options: FinetuneOptions, reason: str) -> str:
    """Return the one line that the user reads when another process is gone."""
    reason = " ".join(reason.split())
    ends = f"finetune: process {team.rank} of {team.count} lost another one, and the run ends: {reason}."
    return f"{ends} {_kept(options)}"


def _kept(options: FinetuneOptions) -> str:
    newest = newest_checkpoint(Path(options.out))
    return "There is no checkpoint yet." if newest is None else f"The last checkpoint is {newest}; --resume continues."


def _header(trainer: Trainer, team: Team, job: RunInputs) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "numpy": np.__version__} | trainer.versions()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "half": trainer.name,
        "options": dataclasses.asdict(job.options),
        "config": job.config,
        "text_tokens": len(job.windows.ids),
        "text_sha256": job.windows.digest(),
        "done": job.done,
        "processes": team.count,
        "versions": versions | {"tiled-mlp": _own_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _own_version() -> str:
    try:
        return metadata.version("tiled-mlp")
    except metadata.PackageNotFoundError:
        return "not installed"

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

from shared_specs.app.budget import check_budget
from shared_specs.app.checkpoint import newest_checkpoint, save_checkpoint, save_sharded_checkpoint, write_folder
from shared_specs.app.job import Job, prepare
from shared_specs.app.log import NoLog, RunLog, read_log, step_records
from shared_specs.app.memory import PeakMemory, resident_bytes
from shared_specs.app.plots import plot_runs
from shared_specs.app.progress import RunProgress
from shared_specs.app.signals import StopRequest, exit_code
from shared_specs.app.team import USER_ERRORS, Team, agreed
from shared_specs.app.trainer import Trainer
from shared_specs.app.weights import write_config, write_model
from shared_specs.cli import FinetuneOptions

PLOT_NAME = "run.png"
MODEL_NAME = "model"


def finetune(trainer: Trainer, options: FinetuneOptions, console: Console | None = None) -> int:
    """Run (or resume) the fine-tuning that the options describe and return the process's exit code.

    Leaves in `--out`: `log.jsonl`, `run.png`, `checkpoints/step-N` (the newest) and, once all steps are done, `model`.
    Of several processes each calls this; process 0 shows and writes what is not in shards.

    Raises:
        InputError: something the user gave cannot be used; nothing was written.
        UnsupportedError, SpecError: the half cannot train this model with these options; nothing was written.
    """
    options.check()
    team = trainer.join(options)
    try:
        return _finetune(trainer, team, options, console or Console(quiet=team.rank != 0))
    except USER_ERRORS:
        raise
    except Exception as error:
        reason = team.lost(error)
        if reason is None:
            raise
        print(_lost(team, options, reason), file=sys.stderr, flush=True)
        return 1
    finally:
        trainer.leave()


def _finetune(trainer: Trainer, team: Team, options: FinetuneOptions, console: Console) -> int:
    job = agreed(team, lambda: _prepared(trainer, team, options))
    before = resident_bytes()
    _load(trainer, team, job)
    if team.rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)
    log = RunLog(job.out) if team.rank == 0 else NoLog()
    try:
        log.write("resume" if options.resume else "start", **_header(trainer, team, job), bytes_before_model=before)
        return _Run(trainer, team, job, log, console).run()
    finally:
        log.close()


def _prepared(trainer: Trainer, team: Team, options: FinetuneOptions) -> Job:
    job = prepare(options, trainer.shard_format, team)
    if options.memory_budget is not None:
        check_budget(job.config, options, trainer.buffers(job.config, options))
    return job


def _load(trainer: Trainer, team: Team, job: Job) -> None:
    """The model, and where a run is resumed its state, are the trainer's from here on."""
    if job.checkpoint is None:
        tensors = agreed(team, lambda: job.files.tensors)  # a file may be damaged where one process reads it only
        trainer.load(job.config, tensors, job.options)
        job.files.tensors.clear()  # the trainer has them: half a gigabyte less in every peak
    elif job.checkpoint.state is None:
        trainer.load(job.config, None, job.options)
        trainer.load_shards(job.checkpoint.shards)
    else:
        state = job.checkpoint.state
        trainer.load(job.config, state.weights, job.options)
        trainer.load_state(state)
        state.optimizer.clear()
        state.weights.clear()


class _Run:
    """One process's part of a run."""

    def __init__(self, trainer: Trainer, team: Team, job: Job, log: RunLog | NoLog, console: Console) -> None:
        self.trainer, self.team, self.job, self.log = trainer, team, job, log
        self.options = job.options
        self.saved = job.done if job.checkpoint else -1
        self.progress = RunProgress(job.options.steps, job.done, console)
        self.began = time.perf_counter()

    def run(self) -> int:
        step, asked = self.job.done, None
        with self.progress, StopRequest(self.progress.say) as stop:
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
            self.log.write("end", step=step, signal=asked)
        return exit_code(asked) if step < self.options.steps else 0

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
        self.log.write("step", **record if math.isfinite(loss) else record | {"loss": str(loss)})
        if math.isfinite(loss):
            mean = (time.perf_counter() - self.began) / (step + 1 - self.job.done)
            self.progress.step(record, mean * (self.options.steps - step - 1))
        return loss

    def _save(self, step: int) -> None:
        """Write the checkpoint of `step`, the plot, and after the last step the model."""
        if step == 0:
            return
        job, weights = self.job, None
        if step != self.saved and self.trainer.sharded:
            write_rest = partial(write_config, config=job.config, tokenizer=job.files.tokenizer)
            save_sharded_checkpoint(
                job.out, self.team, job.record(step), self.trainer.shard_format, self.trainer.save_shards, write_rest
            )
        elif step != self.saved:
            state = self.trainer.state()
            save_checkpoint(job.out, state, job.record(step), job.config, job.files.tokenizer)
            weights = state.weights
        self.saved = step
        if self.team.rank == 0:
            plot_runs({self.trainer.name: step_records(read_log(job.out))}, job.out / PLOT_NAME)
        if step == self.options.steps:
            weights = self.trainer.full_weights() if weights is None else weights
            if self.team.rank == 0:
                write_folder(job.out / MODEL_NAME, lambda folder: self._write_model(folder, weights))

    def _write_model(self, folder: Path, weights: dict[str, np.ndarray]) -> None:
        write_model(folder, self.job.config, weights, self.job.files.tokenizer)

    def _diverged(self, step: int, loss: float) -> int:
        """A loss that is no number ends the run; the checkpoint before it stays."""
        self.log.write("end", step=step, signal=None, diverged=True)
        self.progress.say(f"the loss of step {step} is {loss}: training diverged. Try a smaller --lr in a new --out.")
        return 1


def _summary(trainer: Trainer, team: Team, job: Job) -> str:
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
    """What the user reads when another process is gone; one line."""
    newest = newest_checkpoint(Path(options.out))
    kept = "There is no checkpoint yet." if newest is None else f"The last checkpoint is {newest}; --resume continues."
    reason = " ".join(reason.split())
    return f"finetune: process {team.rank} of {team.count} lost another one, and the run ends: {reason}. {kept}"


def _header(trainer: Trainer, team: Team, job: Job) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "numpy": np.__version__} | trainer.versions()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "half": trainer.name,
        "options": dataclasses.asdict(job.options),
        "config": job.config,
        "text_tokens": len(job.windows.ids),
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

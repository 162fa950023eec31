"""The fine-tuning loop of both halves: windows in, steps driven, everything logged, shown, saved and resumable."""

import dataclasses
import math
import platform
import sys
import time
from datetime import UTC, datetime
from functools import partial
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
from shared_specs.app.finetune.context import check_context, context_axes
from shared_specs.app.finetune.log import Lines, NoLog, RunLog, read_log, step_records
from shared_specs.app.finetune.processes import USER_ERRORS, OutputError, Team, succeed_everywhere
from shared_specs.app.finetune.run_inputs import RunInputs, prepare
from shared_specs.app.finetune.schedule import learning_rate
from shared_specs.app.finetune.step_progress import BACKWARD, RECOMPUTED_BACKWARD, StepProgress
from shared_specs.app.finetune.trainer import Trainer
from shared_specs.app.memory import PeakMemory, resident_bytes
from shared_specs.app.models.weights import write_config, write_model
from shared_specs.app.options import FinetuneOptions, flag
from shared_specs.app.output import try_out, writing
from shared_specs.app.plan.run import planned_run
from shared_specs.app.plots import plot_runs
from shared_specs.app.progress import RunProgress
from shared_specs.app.signals import StopRequest, exit_code
from shared_specs.config import NAMES
from shared_specs.version import own_version

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
    options, said = planned_run(options, "torch" if trainer.name == NAMES["torch"].package else "jax")
    options.check()
    team, stop = trainer.join(options), StopRequest()
    try:
        console = console or Console(quiet=team.rank != 0, stderr=options.json)
        for line in said:
            console.print(line, highlight=False)
        return _finetune(trainer, team, stop, options, console)
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
    job = succeed_everywhere(team, lambda: _prepared(trainer, team, options))
    succeed_everywhere(team, lambda: try_out(job.out))  # once every process has seen that the folder is empty
    before = resident_bytes()
    succeed_everywhere(team, lambda: _load(trainer, job))  # a file may be damaged where one process reads it only
    log = succeed_everywhere(team, writing(job.out, lambda: _opened_log(team, job.out)))
    try:
        header = _header(trainer, team, job) | {"bytes_before_model": before}
        succeed_everywhere(team, writing(job.out, lambda: log.write("resume" if options.resume else "start", **header)))
        return _TrainingRun(trainer, team, job, log, console).run(stop)
    finally:
        log.close()


def _opened_log(team: Team, out: Path) -> RunLog | NoLog:
    if team.rank != 0:
        return NoLog()
    out.mkdir(parents=True, exist_ok=True)
    return RunLog(out)


def _prepared(trainer: Trainer, team: Team, options: FinetuneOptions) -> RunInputs:
    job = prepare(options, trainer.shard_format, team)
    check_context(job.config, options)
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


class _TrainingRun:
    """One process's part of a run."""

    def __init__(self, trainer: Trainer, team: Team, job: RunInputs, log: RunLog | NoLog, console: Console) -> None:
        self.trainer, self.team, self.job, self.log = trainer, team, job, log
        self.options = job.options
        self.lines = Lines() if self.options.json and team.rank == 0 else None
        self.saved = job.done if job.checkpoint else -1
        self.saves = job.options.save_every > 0
        self.progress = RunProgress(job.options.steps, job.done, console)
        recomputed = job.options.checkpointing or job.options.scope == "block"
        self.layers = StepProgress(
            self.progress.within,
            backward=RECOMPUTED_BACKWARD if recomputed else BACKWARD,
            micro_batches=job.options.grad_accumulation,
        )
        if team.rank == 0:
            trainer.watch(self.layers.heard)

    def run(self, stop: StopRequest) -> int:
        step, asked = self.job.done, None
        with self.progress, stop.listen(self.progress.say):
            self.progress.say(_summary(self.trainer, self.team, self.job))
            for name, was in self.job.changed.items():
                self.progress.say(f"{flag(name)} was {was} before, and is {getattr(self.options, name)} from here on")
            if step == 0:
                self._evaluate(step)
            while step < self.options.steps and asked is None:
                wrong = self._step(step)
                if wrong is not None:
                    return self._diverged(step + 1, wrong)
                step += 1
                # A signal may have come to some processes only, or to one of them a step earlier.
                asked = next((signal for signal in self.team.gather(stop.signal) if signal is not None), None)
                if asked is None and (step % self.options.evaluated_every == 0 or step == self.options.steps):
                    self._evaluate(step)
                if self.saves and step % self.options.save_every == 0 and step < self.options.steps and asked is None:
                    self._save(step)
            self._save(step)
            if step == self.options.steps:
                self.progress.say(f"{'model, log' if self.saves else 'log'} and plot are in {self.job.out}")
            elif self.saves:
                self.progress.say(f"stopped after step {step}; the same command with --resume continues")
            else:
                self.progress.say(f"stopped after step {step}; no checkpoint was written (--save-every 0)")
            self._log("end", step=step, signal=asked)
        return exit_code(asked) if step < self.options.steps else 0

    def _log(self, event: str, **values: Any) -> None:
        succeed_everywhere(self.team, writing(self.job.out, lambda: self.log.write(event, **values)))
        if self.lines is not None:
            self.lines.write(event, **values)

    def _evaluate(self, step: int) -> None:
        """The mean loss of all tokens that are held out, after `step` steps; nothing where none is."""
        held_out = self.job.held_out
        if held_out is None:
            return
        start, total, tokens = time.perf_counter(), 0.0, 0
        count = held_out.count(self.options.batch)
        for number, batch in enumerate(held_out.batches(self.options.batch), 1):
            total += self.trainer.evaluate(batch) * batch.valid
            tokens += batch.valid
            self.progress.evaluating(number, count)
        loss, seconds = total / tokens, time.perf_counter() - start
        shown = loss if math.isfinite(loss) else str(loss)
        self._log("eval", step=step, loss=shown, tokens=tokens, seconds=seconds)
        self.progress.say(f"held out after step {step}: loss {loss:.4f} of {tokens} tokens")

    def _step(self, step: int) -> str | None:
        """Step `step`, counted from 0, measured and written down. Return what of it is no number."""
        sequences = self.options.batch * self.options.grad_accumulation
        batch = self.job.data.at(step, sequences)
        self.layers.begin()
        start = time.perf_counter()
        with PeakMemory() as peak:
            loss = self.trainer.step(batch)
        seconds = time.perf_counter() - start
        device_peak = self.trainer.peak_memory_bytes()
        record = {
            "step": step + 1,
            "loss": loss,
            "lr": float(learning_rate(self.options, step)),
            "seconds": seconds,
            "tokens_per_second": sequences * self.options.tokens / seconds,
            "peak_bytes": peak.bytes if device_peak is None else device_peak,
        }
        if self.trainer.gradient_norm is not None:
            record["gradient_norm"] = self.trainer.gradient_norm
        wrong = [name for name in ("loss", "gradient_norm") if name in record and not math.isfinite(record[name])]
        # JSON has no NaN; the text of it says more than a file that strict readers refuse.
        self._log("step", **record | {name: str(record[name]) for name in wrong})
        if wrong:
            return f"the {wrong[0].replace('_', ' ')} of step {step + 1} is {record[wrong[0]]}"
        self.progress.step(record)
        return None

    def _save(self, step: int) -> None:
        """Write the checkpoint of `step`, the plot, and after the last step the model; of a run that saves nothing the plot."""
        if step == 0:
            return
        job = self.job
        if not self.saves:
            succeed_everywhere(self.team, writing(job.out, self._plot))
            return
        if step != self.saved and self.trainer.sharded:
            write_rest = partial(write_config, config=job.config, tokenizer=job.files.tokenizer)
            save_sharded_checkpoint(
                job.out, self.team, job.record(step), self.trainer.shard_format, self.trainer.save_shards, write_rest
            )
        elif step != self.saved:
            save_checkpoint(job.out, self.trainer.state(), job.record(step), job.config, job.files.tokenizer)
        self.saved = step
        succeed_everywhere(self.team, writing(job.out, self._plot))
        if step == self.options.steps:
            write_folder(job.out / MODEL_NAME, self._write_model, self.team)

    def _plot(self) -> None:
        if self.team.rank == 0:
            log, name = read_log(self.job.out), self.trainer.name
            held_out = {f"{name}, held out": step_records(log, "eval")} if self.job.held_out else {}
            plot_runs({name: step_records(log)}, self.job.out / PLOT_NAME, held_out)

    def _write_model(self, folder: Path) -> None:
        weights = iter(self.trainer.full_weights())
        try:
            if self.team.rank == 0:
                write_model(folder, self.job.config, weights, self.job.files.tokenizer)
        finally:
            for _ in weights:  # each is made by all processes together, also when this one cannot write it
                pass

    def _diverged(self, step: int, wrong: str) -> int:
        """End the run at a loss that is no number; the checkpoint before it stays."""
        self._log("end", step=step, signal=None, diverged=True)
        self.progress.say(f"{wrong}: training diverged. Try a smaller --lr in a new --out.")
        return 1


def _summary(trainer: Trainer, team: Team, job: RunInputs) -> str:
    options = job.options
    tiling = "plain" if options.plain else "tiled"
    axes = " x ".join(f"{name} {getattr(options, name)}" for name in ("dp", "fsdp", "cp", "tp"))
    ranks = "" if options.ranks == 1 else f"{axes}, "
    split = context_axes(options, job.config["num_attention_heads"])
    ranks += "rings of {ring} x {cp} ranks, ".format(**split) if "ring" in split else ""
    ranks += "" if team.count == 1 else f"{team.count} processes, "
    batches = "" if options.grad_accumulation == 1 else f"{options.grad_accumulation} x "
    return (
        f"{trainer.name} finetune: {job.files.source.name}, {batches}{options.batch} x {options.tokens} tokens, "
        f"{options.dtype}, {tiling}, {ranks}steps {job.done + 1} to {options.steps}, "
        f"{job.data.told}"
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
        "data": job.data.told,
        "text_tokens": job.data.size,
        "text_sha256": job.digest,
        "day": job.day.isoformat(),
        "done": job.done,
        "processes": team.count,
        "versions": versions | {"tiled-mlp": own_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }

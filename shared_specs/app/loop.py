"""The fine-tuning loop of both halves: windows in, steps driven, everything logged, shown, saved and resumable."""

import dataclasses
import math
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np
from rich.console import Console

from shared_specs.app.checkpoint import save_checkpoint, write_folder
from shared_specs.app.job import Job, prepare
from shared_specs.app.log import RunLog, read_log, step_records
from shared_specs.app.memory import PeakMemory, resident_bytes
from shared_specs.app.plots import plot_runs
from shared_specs.app.progress import RunProgress
from shared_specs.app.signals import StopRequest
from shared_specs.app.trainer import Trainer
from shared_specs.app.weights import write_model
from shared_specs.cli import FinetuneOptions

PLOT_NAME = "run.png"
MODEL_NAME = "model"


def finetune(trainer: Trainer, options: FinetuneOptions, console: Console | None = None) -> int:
    """Run (or resume) the fine-tuning that the options describe and return the process's exit code.

    Leaves in `--out`: `log.jsonl`, `run.png`, `checkpoints/step-N` (the newest) and, once all steps are done, `model`.

    Raises:
        InputError: something the user gave cannot be used; nothing was written.
        UnsupportedError, SpecError: the half cannot train this model with these options; nothing was written.
    """
    console = console or Console()
    job = prepare(options)
    before = resident_bytes()
    trainer.load(job.config, job.checkpoint.state.weights if job.checkpoint else job.files.tensors, options)
    if job.checkpoint:
        trainer.load_state(job.checkpoint.state)
        job.checkpoint.state.optimizer.clear()
        job.checkpoint.state.weights.clear()
    else:
        job.files.tensors.clear()  # the trainer has them: half a gigabyte less in every peak
    job.out.mkdir(parents=True, exist_ok=True)
    log = RunLog(job.out)
    try:
        log.write("resume" if options.resume else "start", **_header(trainer, job), bytes_before_model=before)
        return _Run(trainer, job, log, console).run()
    finally:
        log.close()


class _Run:
    """One process's part of a run."""

    def __init__(self, trainer: Trainer, job: Job, log: RunLog, console: Console) -> None:
        self.trainer, self.job, self.log = trainer, job, log
        self.options = job.options
        self.saved = job.done if job.checkpoint else -1
        self.progress = RunProgress(job.options.steps, job.done, console)
        self.began = time.perf_counter()

    def run(self) -> int:
        step = self.job.done
        with self.progress, StopRequest(self.progress.say) as stop:
            self.progress.say(_summary(self.trainer, self.job))
            while step < self.options.steps and stop.signal is None:
                loss = self._step(step)
                if not math.isfinite(loss):
                    return self._diverged(step + 1, loss)
                step += 1
                if step % self.options.save_every == 0 and step < self.options.steps:
                    self._save(step)
            self._save(step)
            if step == self.options.steps:
                self.progress.say(f"model, log and plot are in {self.job.out}")
            else:
                self.progress.say(f"stopped after step {step}; the same command with --resume continues")
            self.log.write("end", step=step, signal=stop.signal)
        return stop.exit_code if step < self.options.steps else 0

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
        job, state = self.job, self.trainer.state()
        if step != self.saved:
            save_checkpoint(job.out, state, job.record(step), job.config, job.files.tokenizer)
            self.saved = step
        plot_runs({self.trainer.name: step_records(read_log(job.out))}, job.out / PLOT_NAME)
        if step == self.options.steps:
            write_folder(
                job.out / MODEL_NAME, lambda folder: write_model(folder, job.config, state.weights, job.files.tokenizer)
            )

    def _diverged(self, step: int, loss: float) -> int:
        """A loss that is no number ends the run; the checkpoint before it stays."""
        self.log.write("end", step=step, signal=None, diverged=True)
        self.progress.say(f"the loss of step {step} is {loss}: training diverged. Try a smaller --lr in a new --out.")
        return 1


def _summary(trainer: Trainer, job: Job) -> str:
    options = job.options
    tiling = "plain" if options.plain else "tiled"
    return (
        f"{trainer.name} finetune: {job.files.source.name}, {options.batch} x {options.tokens} tokens, "
        f"{options.dtype}, {tiling}, steps {job.done + 1} to {options.steps}, text of {len(job.windows.ids)} tokens"
    )


def _header(trainer: Trainer, job: Job) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "numpy": np.__version__} | trainer.versions()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "half": trainer.name,
        "options": dataclasses.asdict(job.options),
        "config": job.config,
        "text_tokens": len(job.windows.ids),
        "done": job.done,
        "versions": versions | {"tiled-mlp": _own_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _own_version() -> str:
    try:
        return metadata.version("tiled-mlp")
    except metadata.PackageNotFoundError:
        return "not installed"

"""A fine-tuning run before it starts: everything read and checked, nothing written."""

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_specs.app.data.batches import Data, HeldOut
from shared_specs.app.data.choice import make_data
from shared_specs.app.finetune.checkpoint import Checkpoint, load_checkpoint
from shared_specs.app.finetune.log import read_log, run_header
from shared_specs.app.finetune.processes import ALONE, Team
from shared_specs.app.memory import machine_bytes
from shared_specs.app.models.model_config import check_context, scale_positions
from shared_specs.app.models.weights import ModelFiles, read_model
from shared_specs.app.options import FinetuneOptions, InputError, fixed_fields, flag
from shared_specs.app.output import check_can_be_made, check_room


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run.

    Attributes:
        files: the model; for a resumed run its checkpoint.
        config: the model's configuration with `--rope-scale` applied.
        data: what it trains on. held_out: what it is evaluated on; None without --eval-fraction.
        digest: of all of the data.
        checkpoint: where a resumed run continues; None at the beginning.
        day: that the run began, which a chat template may write.
        changed: options that a resumed run has other than it began, which they may be: name -> what they were.
    """

    options: FinetuneOptions
    out: Path
    files: ModelFiles
    config: dict[str, Any]
    data: Data
    held_out: HeldOut | None
    digest: str
    checkpoint: Checkpoint | None
    day: datetime.date
    changed: dict[str, Any]

    @property
    def done(self) -> int:
        """Steps done before this process."""
        return self.checkpoint.record["step"] if self.checkpoint else 0

    def record(self, step: int) -> dict[str, Any]:
        """Return the notes of a checkpoint, against which a resumed run is held."""
        options = fixed_fields(self.options)
        return {"step": step, "options": options, "text_sha256": self.digest, "day": self.day.isoformat()}


def prepare(options: FinetuneOptions, shard_format: str = "", team: Team = ALONE) -> RunInputs:
    """Read and check everything a run needs.

    Args:
        shard_format: the form of sharded checkpoints that the trainer reads.

    Raises:
        InputError: an option, the model, the text, `--out` or the checkpoint cannot be used.
    """
    options.check()
    out = Path(options.out)
    checkpoint, record, began = _resumed(options, out, team)
    if checkpoint and checkpoint.shard_format not in (None, shard_format):
        raise InputError(
            f"finetune: --resume found a checkpoint of the form {checkpoint.shard_format}, which is not this half's. "
            "Resume it with the half that wrote it."
        )
    if record is not None:
        _check_same_options(options, record)
    files = read_model(checkpoint.folder if checkpoint else options.model)
    config = scale_positions(files.config, options.rope_scale)
    check_context(config, options.tokens)
    _check_batch(config, options)
    if checkpoint is None:
        _ = files.weights  # those of a checkpoint were verified
    if team.rank == 0:
        check_room(out, config, options, checkpoint.record["step"] if checkpoint else None)
    day = datetime.date.today() if record is None or "day" not in record else datetime.date.fromisoformat(record["day"])
    data, held_out = make_data(options, files, config, day), None
    digest = data.digest()
    if options.eval_fraction:
        data, held_out = data.split(options.eval_fraction)
    job = RunInputs(
        options=options,
        out=out,
        files=files,
        config=config,
        data=data,
        held_out=held_out,
        digest=digest,
        checkpoint=checkpoint,
        day=day,
        changed=_changed(options, began),
    )
    if record is not None:
        _check_same_text(job, record)
    return job


def _resumed(
    options: FinetuneOptions, out: Path, team: Team
) -> tuple[Checkpoint | None, dict[str, Any] | None, dict[str, Any]]:
    """Return the checkpoint that a run continues from, and the record of its beginning; None for what there is not; and the
    options that the run was given last.
    """
    check_can_be_made(out)
    if options.resume:
        log = read_log(out)
        header = run_header(out, log)  # refuses a folder that holds no run
        last = next((found["options"] for found in reversed(log) if isinstance(found.get("options"), dict)), {})
        checkpoint = load_checkpoint(out, team)
        return checkpoint, checkpoint.record if checkpoint else header, last
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(
            f"finetune: --out must be a new or empty folder, got {out}, which is not. "
            "Pass another one, or --resume to continue the run in it."
        )
    return None, None, {}


def _changed(options: FinetuneOptions, before: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are other than they were: name -> what they were."""
    told = dataclasses.asdict(options)
    left_out = ("resume", "out", "json", "steps")  # which every resumed run may have others of, and of which it tells
    return {name: was for name, was in before.items() if name in told and name not in left_out and told[name] != was}


def _check_batch(config: dict[str, Any], options: FinetuneOptions) -> None:
    """Refuse a batch of which this machine cannot hold one hidden state, let alone train on it, before it is cut."""
    tokens = options.tokens // options.cp
    bytes_each = config["hidden_size"] * (2 if options.dtype == "bfloat16" else 4) * tokens
    most = max(machine_bytes() // bytes_each, 1) * options.dp * options.fsdp
    if options.batch > most:
        raise InputError(
            f"finetune: --batch must be <= {most}, the sequences of which this machine can hold a single hidden state, "
            f"got {options.batch}."
        )


def _check_same_options(options: FinetuneOptions, record: dict[str, Any]) -> None:
    """The losses can only be those of the uninterrupted run if all that decides them is the same."""
    defaults = fixed_fields(FinetuneOptions())  # of an option that is younger than the run
    for name, value in fixed_fields(options).items():
        began = record["options"].get(name, defaults.get(name))
        if began != value:
            raise InputError(
                f"finetune: {flag(name)} must be {began}, as the run in {options.out} began, "
                f"got {value}. Repeat its options to resume it."
            )


def _check_same_text(job: RunInputs, record: dict[str, Any]) -> None:
    if record["text_sha256"] != job.digest:
        option = "--text must be the text" if job.options.chat is None else "--chat must be the conversations"
        raise InputError(
            f"finetune: {option} that the run in {job.out} began with, got another one. Start again in a new --out."
        )
    if job.done > job.options.steps:
        raise InputError(
            f"finetune: --steps must be >= {job.done}, the steps that the run in {job.out} has done, "
            f"got {job.options.steps}. It counts all steps of the run."
        )

"""Checkpoints that a kill at any moment cannot spoil: written beside, synced, renamed, and checked when read."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared_specs.app.finetune.processes import ALONE, Team, succeed_everywhere
from shared_specs.app.finetune.stored import stored_arrays, write_arrays
from shared_specs.app.finetune.trainer import TrainerState
from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.models.weights import write_model
from shared_specs.app.options import InputError
from shared_specs.app.output import writing

_FOLDER = "checkpoints"
_SHARDS = "shards"
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint of a run.

    Attributes:
        folder: a model folder too, loadable by `transformers`, unless the state is in shards.
        record: what the loop noted: `step`, the fixed options and the digest of the text.
        state: its arrays, which stay in their files; None where it is in shards.
        shard_format: of what `shards` holds; None where there are none.
    """

    folder: Path
    record: dict[str, Any]
    state: TrainerState | None

    @property
    def shard_format(self) -> str | None:
        return self.record.get("shard_format")

    @property
    def shards(self) -> Path:
        """Return the folder that all ranks wrote into."""
        return self.folder / _SHARDS


def save_checkpoint(
    out: Path, state: TrainerState, record: dict[str, Any], config: dict[str, Any], tokenizer: ModelTokenizer
) -> Path:
    """Write the checkpoint of `record["step"]` below `out`, then remove the older ones. Returns its folder."""

    def write(folder: Path) -> None:
        write_model(folder, config, state.weights.items(), tokenizer)
        shapes = {name: array.shape for name, array in state.optimizer.items()}
        write_arrays(folder / "optimizer.safetensors", shapes, state.optimizer.items())

    return _save(out, record, write, ALONE)


def save_sharded_checkpoint(
    out: Path,
    team: Team,
    record: dict[str, Any],
    shard_format: str,
    save_shards: Callable[[Path], None],
    write_rest: Callable[[Path], None],
) -> Path:
    """`save_checkpoint` by all processes of a team: each writes its part with `save_shards`, process 0 the rest."""

    def write(folder: Path) -> None:
        shards = folder / _SHARDS
        shards.mkdir(exist_ok=True)  # whoever comes first
        save_shards(shards)
        if team.rank == 0:
            write_rest(folder)

    return _save(out, record | {"shard_format": shard_format}, write, team)


def _save(out: Path, record: dict[str, Any], write: Callable[[Path], None], team: Team) -> Path:
    target = out / _FOLDER / f"step-{record['step']:08d}"

    def seal(folder: Path) -> None:
        (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / _MANIFEST).write_text(json.dumps(_digests(folder), indent=2) + "\n")

    write_folder(target, write, team, seal)
    if team.rank == 0:
        for older in _folders(out)[:-1]:
            shutil.rmtree(older)
    return target


def load_checkpoint(out: Path, team: Team = ALONE) -> Checkpoint | None:
    """Return the newest checkpoint below `out`, verified by process 0; None where the run has not come to its first.

    Raises:
        InputError: it is damaged: a file is missing or is not what was written.
    """
    folders = _folders(out)
    if not folders:
        return None
    folder = folders[-1]
    if team.rank == 0:
        _verify(folder)
    try:
        record = json.loads((folder / "run.json").read_text())
        if "shard_format" in record:
            return Checkpoint(folder, record, None)
        weights, optimizer = (stored_arrays(folder / f"{name}.safetensors") for name in ("model", "optimizer"))
    except (OSError, ValueError, SafetensorError) as error:  # in the processes that did not verify
        raise _damaged(folder, str(error)) from error
    return Checkpoint(folder, record, TrainerState(weights=weights, optimizer=optimizer))


def write_folder(
    target: Path, write: Callable[[Path], None], team: Team = ALONE, seal: Callable[[Path], None] | None = None
) -> None:
    """Fill a new folder with `write` and put it at `target` in one step, replacing what is there.

    All processes of a team write into it; `seal` is then called by process 0 alone. Every byte is on the disk before the
    name changes, so `target` is never a part of a folder: it is the old one, the new one or, where one is replaced, for
    the instant between two renames none.

    Raises:
        InputError: one of the processes could not write, on a full disk for example; what it wrote is gone, and `target`
            as it was.
    """
    partial = target.with_name(_PARTIAL + target.name)
    try:
        _write(partial, target, write, team, seal)
    except InputError:
        if team.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk has room again
        raise


def _write(
    partial: Path,
    target: Path,
    write: Callable[[Path], None],
    team: Team,
    seal: Callable[[Path], None] | None,
) -> None:
    def begin() -> None:
        if team.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            for leftover in target.parent.glob(_PARTIAL + "*"):
                shutil.rmtree(leftover)
            partial.mkdir()

    def finish() -> None:
        if team.rank == 0:
            if seal is not None:
                seal(partial)
            _put(partial, target)

    # Nobody writes before the folder is there, nor renames it before all have written.
    for work in (begin, lambda: write(partial), finish):
        succeed_everywhere(team, writing(target.parent, work))


def _put(partial: Path, target: Path) -> None:
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    if target.exists():
        replaced = target.with_name(f"{_PARTIAL}replaced-{target.name}")
        target.rename(replaced)
        try:
            partial.rename(target)
        except OSError:
            replaced.rename(target)
            raise
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    _sync(target.parent)


def newest_checkpoint(out: Path) -> Path | None:
    """Return the folder of the newest checkpoint below `out`, as it is."""
    return next(reversed(_folders(out)), None)


def _folders(out: Path) -> list[Path]:
    return sorted((out / _FOLDER).glob("step-*"))


def _verify(folder: Path) -> None:
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        found = _digests(folder, list(expected))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(folder, str(error)) from error
    wrong = sorted(name for name in expected if found[name] != expected[name])
    if wrong or "run.json" not in expected:
        raise _damaged(folder, f"{', '.join(wrong) or _MANIFEST} is not what was written")


def _damaged(folder: Path, reason: str) -> InputError:
    return InputError(f"finetune: --resume found a damaged checkpoint, {folder}: {reason}. Start again in a new --out.")


def _digests(folder: Path, names: list[str] | None = None) -> dict[str, str]:
    if names is None:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    digests = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

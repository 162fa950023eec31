"""Checkpoints that a kill at any moment cannot spoil: written beside, synced, renamed, and checked when read."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from shared_specs.app.tokenizer import ModelTokenizer
from shared_specs.app.trainer import TrainerState
from shared_specs.app.weights import contiguous, write_model
from shared_specs.cli import InputError

_FOLDER = "checkpoints"
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint of a run. Its folder is a model folder too, loadable by `transformers`.

    Attributes:
        record: what the loop noted: `step`, the fixed options and the digest of the text.
    """

    folder: Path
    record: dict[str, Any]
    state: TrainerState


def save_checkpoint(
    out: Path, state: TrainerState, record: dict[str, Any], config: dict[str, Any], tokenizer: ModelTokenizer
) -> Path:
    """Write the checkpoint of `record["step"]` below `out`, then remove the older ones. Returns its folder."""
    target = out / _FOLDER / f"step-{record['step']:08d}"

    def write(folder: Path) -> None:
        write_model(folder, config, state.weights, tokenizer)
        save_file(contiguous(state.optimizer), folder / "optimizer.safetensors")
        (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / _MANIFEST).write_text(json.dumps(_digests(folder), indent=2) + "\n")

    write_folder(target, write)
    for older in _folders(out)[:-1]:
        shutil.rmtree(older)
    return target


def load_checkpoint(out: Path) -> Checkpoint | None:
    """The newest checkpoint below `out`; None where the run has not come to its first.

    Raises:
        InputError: it is damaged: a file is missing or is not what was written.
    """
    folders = _folders(out)
    if not folders:
        return None
    folder = folders[-1]
    _verify(folder)
    state = TrainerState(
        weights=load_file(folder / "model.safetensors"), optimizer=load_file(folder / "optimizer.safetensors")
    )
    return Checkpoint(folder, json.loads((folder / "run.json").read_text()), state)


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder with `write` and put it at `target` in one step, replacing what is there.

    Every byte is on the disk before the name changes, so `target` is never a part of a folder: it is the old one, the
    new one or, where one is replaced, for the instant between two renames none.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(_PARTIAL + "*"):
        shutil.rmtree(leftover)
    partial = target.with_name(_PARTIAL + target.name)
    partial.mkdir()
    write(partial)
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    if target.exists():
        replaced = target.with_name(f"{_PARTIAL}replaced-{target.name}")
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    _sync(target.parent)


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
    names = sorted(file.name for file in folder.iterdir()) if names is None else names
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

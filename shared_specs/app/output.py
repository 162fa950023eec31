"""`--out`: whether the run's folder can be made and has room, asked before a model is loaded; what it means that a write
fails."""

import os
import shutil
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from shared_specs.app.finetune.processes import OutputError
from shared_specs.app.models.model_config import weight_shapes
from shared_specs.app.options import FinetuneOptions, InputError

_T = TypeVar("_T")
_FLOAT32 = 4


def writing(place: Path, work: Callable[[], _T]) -> Callable[[], _T]:
    """`work`, of which an error of the file system is an OutputError that names `place`."""

    def guarded() -> _T:
        try:
            return work()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"finetune: --out cannot be written to: {reason} ({place}).") from error

    return guarded


def check_can_be_made(out: Path) -> None:
    """Refuse a folder that could not be made or written to now, by what can be seen of it; nothing is tried out.

    Raises:
        InputError: it could not.
    """
    for there in (out, *out.absolute().parents):
        try:
            there.lstat()  # not exists(): a link to nothing is in the way too
        except (FileNotFoundError, NotADirectoryError):
            continue  # to be made, or below a file
        except OSError as error:
            reason = f"{there} cannot be looked at ({error.strerror})"
        else:
            if not there.is_dir():
                if there == out and out.exists():
                    return  # refused as one that is not empty
                reason = f"{there} is no folder"
            elif os.access(there, os.W_OK | os.X_OK):
                return
            else:
                reason = f"{there} may not be written to"
        raise _refused(out, reason)


def try_out(out: Path) -> None:
    """Refuse a folder in which nothing can be written whatever its permissions say: make a file there, and remove it."""
    place = _existing(out)
    try:
        with tempfile.TemporaryDirectory(prefix=".tiled-", dir=place) as folder:
            file = Path(folder) / "file"
            file.write_bytes(bytes(1 << 12))
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    except OSError as error:
        raise _refused(out, f"nothing can be written in {place} ({error.strerror})") from error


def check_records(folder: str) -> None:
    """Refuse, before anything is measured, a folder that `bench` could not write its record to.

    Raises:
        InputError: it could not.
    """
    try:
        check_can_be_made(Path(folder))
        if Path(folder).exists() and not Path(folder).is_dir():
            raise _refused(Path(folder), "it is no folder")
        try_out(Path(folder))
    except InputError as error:
        raise InputError(str(error).replace("finetune:", "bench:", 1)) from error


def check_room(out: Path, config: dict[str, Any], options: FinetuneOptions, done: int | None) -> None:
    """Refuse a disk on which the checkpoints and the model of the run do not fit; one that saves neither needs no room.

    Args:
        done: steps of the checkpoint that is there, which the next one replaces once it is written; None without one.
    Raises:
        InputError: too few bytes are free.
    """
    if options.save_every == 0:
        return
    weights = _FLOAT32 * sum(prod(shape) for shape in weight_shapes(config).values())
    checkpoint = 3 * weights  # and two moments of the optimizer
    if done is None:
        needed = 2 * checkpoint if options.steps > options.save_every else checkpoint + weights
    else:
        needed = checkpoint if options.steps > done else weights
    total, _, free = shutil.disk_usage(_existing(out))
    if total and free < needed:  # what has no size at all is no disk, which try_out refuses
        raise InputError(
            f"finetune: --out must have {_size(needed)} of room for the checkpoints and the model of this run, got "
            f"{_size(free)} ({out}). Free some, or pass a folder on another disk."
        )


def _existing(out: Path) -> Path:
    """Return the folder itself, or the nearest one above it that is there."""
    return next(there for there in (out, *out.absolute().parents) if there.is_dir())


def _refused(out: Path, reason: str) -> InputError:
    return InputError(f"finetune: --out must be a folder that can be made, got {out}: {reason}. Pass another one.")


def _size(count: int) -> str:
    unit, name = next(
        ((1 << 10 * power, name) for power, name in ((3, "GiB"), (2, "MiB")) if count >> 10 * power), (1, "")
    )
    return f"{count / unit:.1f} {name}" if name else f"{count} bytes"

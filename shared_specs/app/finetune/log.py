"""The log of a run: JSON lines, one record a step, readable while the run goes on and after a kill."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from shared_specs.app.options import InputError

LOG_NAME = "log.jsonl"


class RunLog:
    """Appends records to `log.jsonl` in a folder; each is on disk's way before `write` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_NAME
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        if torn:  # a kill in the middle of a line: what follows gets a line of its own
            self._file.write("\n")

    def write(self, event: str, **values: Any) -> None:
        """Append one record, `{"event": event, ...}`."""
        self._file.write(json.dumps({"event": event, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that a full disk did not take, for which write raised
            self._file.close()


class NoLog:
    """The log of a process that leaves writing to another one."""

    def write(self, event: str, **values: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """The records of a run on the standard output, one a line, for `--json`. A reader that is gone does not end the run."""

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stdout

    def write(self, event: str, **values: Any) -> None:
        """Print one record, `{"event": event, ...}`."""
        if self._stream is None:
            return
        try:
            print(json.dumps({"event": event, **values}), file=self._stream, flush=True)
        except OSError as error:
            if self._stream is sys.__stdout__:  # what is left in its buffer would fail again at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stream = None
            with contextlib.suppress(OSError):
                reason = error.strerror or str(error)
                print(f"finetune: --json cannot be written ({reason}); the run goes on, see its log.", file=sys.stderr)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return all whole records of a run's log, in the order they were written.

    Raises:
        InputError: there is no log in the folder, or what is there was not written as one.
    """
    try:
        lines = (folder / LOG_NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        raise InputError(f"finetune: --out {folder} holds no run ({LOG_NAME} is missing).") from None
    except UnicodeDecodeError:
        raise _damaged(folder, "it is not UTF-8 text") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a kill; the step was not counted either
        if not isinstance(record, dict) or "event" not in record:  # no part of a record is JSON by itself
            raise _damaged(folder, f"line {number} is no record")
        records.append(record)
    return records


def run_header(folder: Path, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the options and the digest of the text that a run began with; None where it was ended while it wrote them.

    Raises:
        InputError: its first record has none.
    """
    if not records:
        return None
    header = records[0]
    if not (isinstance(header.get("options"), dict) and isinstance(header.get("text_sha256"), str)):
        raise _damaged(folder, "its first record is not that of a beginning")
    return header


def _damaged(folder: Path, reason: str) -> InputError:
    return InputError(f"finetune: --out {folder} holds a damaged {LOG_NAME}: {reason}. Start again in a new --out.")


def step_records(records: list[dict[str, Any]], event: str = "step") -> list[dict[str, Any]]:
    """Return the record of each step, in order; a step that was done again after a resume counts once, the last time.

    A step whose loss was no number, with which a run ends, is left out. event: "eval" for the evaluations after them.
    """
    steps = {
        record["step"]: record for record in records if record["event"] == event and isinstance(record["loss"], float)
    }
    return [steps[step] for step in sorted(steps)]

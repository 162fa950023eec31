"""Watches what is on the disk when a folder gets its name, and makes a disk that takes no more."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Renames:
    """The folders renamed while it watches, each with its files that no fsync had reached as they then were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: dict[str, list[str]] = {}
        self.parents_after: list[str] = []
        self._synced: dict[int, int] = {}
        self._fsync, self._rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", self._note_sync)
        monkeypatch.setattr(os, "rename", self._note_rename)

    def _note_sync(self, handle: int) -> None:
        self._fsync(handle)
        state = os.fstat(handle)
        self._synced[state.st_ino] = state.st_mtime_ns
        for name in self.unsynced:
            if Path(name).parent.exists() and os.path.samestat(Path(name).parent.stat(), state):
                self.parents_after.append(name)

    def _note_rename(self, source: Any, target: Any, **others: Any) -> None:
        folder = Path(source)
        if folder.is_dir():
            inside = [folder, *folder.rglob("*")]
            late = [path for path in inside if self._synced.get(path.stat().st_ino) != path.stat().st_mtime_ns]
            self.unsynced[str(target)] = [str(path.relative_to(folder)) for path in late]
        self._rename(source, target, **others)


def assert_synced_before_the_name(renames: Renames, *targets: Path) -> None:
    """Each target was renamed to with all its files and folders on the disk, and the renaming too is there now."""
    for target in map(str, targets):
        assert renames.unsynced[target] == []
        assert target in renames.parents_after


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """The kernel refuses longer files, as it would on a full disk, whoever writes them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

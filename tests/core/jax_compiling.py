"""XLA's compiler, most of the time of JAX's tests: programs that are alike to the last operation are compiled once."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).parents[2]
OPTIMIZED = "xla_backend_optimization_level=0" not in os.environ["XLA_FLAGS"]  # as for users; see tests/conftest.py
KEPT_SECONDS = 14 * 24 * 3600
# Without XLA's own caches: their folder's name would be part of every program's key.
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
}
# A thunk's communicator is a resource that orders a device's collectives. XLA's CPU compiler gives all thunks of a program one;
# a program read from a cache has one for each (thunk_proto_serdes.cc, CreateResourceFromProto), so that its devices begin with
# different collectives and wait for each other for ever: one program of `parallelize` did in 10 runs of 16.
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


@pytest.fixture(scope="session")
def compiled_once_a_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """By this process: the cache is no place for two to write to at once. All files of JAX's tests use it (tests/conftest.py).

    TILED_JAX_CACHE names a folder of what earlier runs compiled: it is linked in before and added to afterwards. A program of
    several collectives is compiled anew each time.
    """
    folder, shared = tmp_path_factory.mktemp("compiled"), _shared_folder()
    known = _linked(shared, folder) if shared else set()
    with (
        _configured(_KEEP_ALL | {"jax_compilation_cache_dir": str(folder)}),
        patch.object(compiler, "_cache_write", partial(_write_unless_collectives, compiler._cache_write)),
    ):
        yield
    if shared:
        _linked(folder, shared, without=known)


def _write_unless_collectives(
    write: Callable[..., None], key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any
) -> None:
    """JAX's `_cache_write` (with callbacks before 0.11) but for programs whose collectives would lose their order."""
    if len(executable.local_devices()) > 1:
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
        if sum(text.count(f" {name}{suffix}(") for name in _COLLECTIVES for suffix in ("", "-start")) > 1:
            return
    write(key, seconds, name, backend, executable, *callbacks)


def _shared_folder() -> Path | None:
    """Where programs of this processor are kept between runs, without those of old code; None where nothing is kept."""
    if not os.environ.get("TILED_JAX_CACHE"):
        return None
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0] if os.path.exists("/proc/cpuinfo") else ""
    # The last word leaves behind what was kept before programs of several collectives were left out.
    what = "\n".join(line for line in processor.splitlines() if line.startswith(("model name", "flags"))) + "ordered"
    folder = Path(os.environ["TILED_JAX_CACHE"]) / sha256(what.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*-cache"):
        with suppress(FileNotFoundError):  # another process of this run removed it
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
    return folder


def _linked(source: Path, target: Path, without: AbstractSet[str] = frozenset()) -> set[str]:
    """Links every program of one folder into another; several processes may do so at once. Returns their names."""
    names = {path.name for path in source.glob("*-cache")} - without
    for name in names:
        try:
            os.link(source / name, target / name)
        except (FileExistsError, FileNotFoundError):  # another process was first
            continue
        except OSError:  # another file system: a copy, whole before it has its name
            part = target / f"{name}.{os.getpid()}"
            shutil.copyfile(source / name, part)
            part.replace(target / name)
    return names


def assert_passes_optimized(test: str) -> None:
    """Runs one test in a process of its own whose programs LLVM optimizes: for what holds to the last bit only there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", test]
    environment = os.environ | {"TILED_OPTIMIZE": "1", "XLA_FLAGS": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
    assert "1 passed" in run.stdout


@contextmanager
def compiled_plainly() -> Iterator[None]:
    """Programs are not optimized, where all others are too, and kept as all others: for tests that train whole models."""
    with _configured({"jax_disable_most_optimizations": True}):
        yield


def kept() -> dict[str, str]:
    """The environment of one process on one device that is waited for: its programs are kept where this one's are."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    assert folder is not None, "compiled_once_a_session is not in use"
    return {name.upper(): str(value) for name, value in (_KEEP_ALL | {"jax_compilation_cache_dir": folder}).items()}


def xla_flags_with(**flags: object) -> dict[str, str]:
    """The environment of a process with this one's XLA flags but for those given."""
    words = [word for word in os.environ["XLA_FLAGS"].split() if word[2:].partition("=")[0] not in flags]
    return {"XLA_FLAGS": " ".join([*words, *(f"--{name}={value}" for name, value in flags.items())])}


@contextmanager
def _configured(options: dict[str, object]) -> Iterator[None]:
    before = {name: jax.config.values[name] for name in options}
    _set(options)
    try:
        yield
    finally:
        _set(before)


def _set(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # which looks at the folder once

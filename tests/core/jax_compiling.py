"""XLA's compiler, most of the time of JAX's tests: programs that are alike to the last operation are compiled once."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import jax
import pytest
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


@pytest.fixture(scope="session")
def compiled_once_a_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """By this process: the cache is no place for two to write to at once. Every test of JAX uses it (tests/conftest.py).

    TILED_JAX_CACHE names a folder of what earlier runs compiled: it is linked in before and added to afterwards.
    """
    folder, shared = tmp_path_factory.mktemp("compiled"), _shared_folder()
    known = _linked(shared, folder) if shared else set()
    with _configured(_KEEP_ALL | {"jax_compilation_cache_dir": str(folder)}):
        yield
    if shared:
        _linked(folder, shared, without=known)


def _shared_folder() -> Path | None:
    """Where programs of this processor are kept between runs, without those of old code; None where nothing is kept."""
    if not os.environ.get("TILED_JAX_CACHE"):
        return None
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0] if os.path.exists("/proc/cpuinfo") else ""
    what = "\n".join(line for line in processor.splitlines() if line.startswith(("model name", "flags")))
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    environment = os.environ | {"TILED_OPTIMIZE": "1", "XLA_FLAGS": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
    assert "1 passed" in run.stdout


@contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Programs are kept in an empty folder, and not optimized, where all others are too: for tests that train whole models."""
    with _configured(_KEEP_ALL | {"jax_compilation_cache_dir": str(folder), "jax_disable_most_optimizations": True}):
        yield


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

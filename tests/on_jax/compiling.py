"""XLA's compiler, most of the time of JAX's tests: programs that are alike to the last operation are compiled once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).parents[2]
OPTIMIZED = "xla_backend_optimization_level=0" not in os.environ["XLA_FLAGS"]  # as for users; see tests/conftest.py
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="session", autouse=True)
def _compiled_once_a_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """By this process: the cache is no place for two to write to at once. For a conftest to import."""
    with _configured(_KEEP_ALL | {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}):
        yield


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

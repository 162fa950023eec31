"""XLA's compiler, for tests that build one program many times over."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_WANTED = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": True,
}


@contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Programs that are alike to the last operation are compiled once, kept in an empty folder, and not optimized:
    compiling is most of the time of the tests that use this."""
    wanted = {"jax_compilation_cache_dir": str(folder)} | _WANTED
    before = {name: jax.config.values[name] for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # which looks at the folder once

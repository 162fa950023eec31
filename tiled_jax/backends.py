"""Which backends can run here and, where one cannot, why not."""

from collections.abc import Mapping
from typing import Literal

import jax

from shared_specs import checks, config

# The reason is about the code of today, not about the machine: no device would change it.
_NO_PALLAS = "tiled_jax has no Pallas kernel for this operation yet; the XLA path runs on every device."
_REASONS: dict[str, str | None] = {"xla": None, "pallas": _NO_PALLAS}

_last: dict[str, str] = {}


def usable_backends() -> Mapping[str, str | None]:
    """Every backend by name, with None where it can run here and the reason where it cannot.

    Example:
        >>> usable_backends()["xla"] is None
        True
    """
    return dict(_REASONS)


def choose(function: str, backend: object) -> str:
    """The backend that runs for this argument; a backend named explicitly runs or is refused, it never falls back.

    Raises:
        SpecError: no such backend. UnsupportedError: it cannot run here; the message says why.
    """
    checks.check_backend(function, backend, config.JAX, _REASONS)
    return "xla" if backend == "auto" else str(backend)


def record_run(function: str, backend: str) -> None:
    """Called from the code of a backend itself, so that `last_run` reports what ran and not what was asked for."""
    _last[function] = backend


def last_run(function: str) -> str | None:
    """The backend whose code was last traced for this public function; None before its first trace.

    A call that finds its compiled program in JAX's cache traces nothing and leaves this as it was.
    """
    return _last.get(function)


def device_kind() -> Literal["cpu", "gpu"]:
    """The kind of device an automatic plan aims at: JAX's default one, as shapes are all that tracing sees."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"

"""Which backend is usable here and, if not, why not; and which one ran."""

from collections.abc import Mapping

_ran: dict[str, str] = {}


def usable_backends() -> Mapping[str, str | None]:
    """Name of every backend -> None where it can run on this machine, else the reason.

    Example:
        >>> usable_backends()["eager"] is None
        True
    """
    return {
        "eager": None,
        "triton": "tiled_torch has no Triton kernel for this operation yet; the eager backend runs on every device.",
    }


def record_run(function: str, backend: str) -> None:
    """Notes which backend a public function chose, for `last_run`."""
    _ran[function] = backend


def last_run(function: str) -> str | None:
    """The backend that the last call of a public function ran on; None before the first call."""
    return _ran.get(function)

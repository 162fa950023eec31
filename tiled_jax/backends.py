"""Which backends can run here and, where one cannot, why not."""

import os
from collections.abc import Callable, Mapping
from typing import Literal

import jax

from shared_specs import config
from shared_specs.core import checks

# For functions whose computation no kernel has; the reason is about the code of today, not about the machine.
NO_KERNEL = "tiled_jax has no Pallas kernel for this operation yet; the XLA path runs on every device."
# "1" runs the Pallas kernels in JAX's GPU interpreter on any machine, for tests: see tiled_jax.core.mosaic.
INTERPRET = "TILED_PALLAS_INTERPRET"

_last: dict[str, str] = {}


def interpreting() -> bool:
    """Return whether the environment, read now, asks for the interpreter in place of a GPU."""
    return os.environ.get(INTERPRET) == "1"


def usable_backends() -> Mapping[str, str | None]:
    """Return every backend by name, with None where it can run here and the reason where it cannot.

    A call may still be refused for its dtype or its sizes: the message says which.

    Example:
        >>> usable_backends()["xla"] is None
        True
    """
    return {"xla": None, "pallas": None if interpreting() else _no_hopper()}


def choose(
    function: str,
    backend: object,
    *,
    no_kernel: Callable[[], str | None] = lambda: NO_KERNEL,
    usable: Mapping[str, str | None] | None = None,
) -> str:
    """Return the backend that runs for this argument; a backend named explicitly runs or is refused, it never falls back.

    Args:
        no_kernel: says why this call has no Pallas kernel, or None where it has one. Asked only where a kernel might run:
            elsewhere the answer is not worth loading Mosaic for.
        usable: what `usable_backends` has told this call already.
    Raises:
        SpecError: no such backend. UnsupportedError: it cannot run here; the message says why.
    """
    reasons = dict(usable_backends() if usable is None else usable)
    if backend != "xla" and reasons["pallas"] is None:
        reasons["pallas"] = no_kernel()
    checks.check_backend(function, backend, config.JAX, reasons)
    if backend != "auto":
        return str(backend)
    return "pallas" if reasons["pallas"] is None and not interpreting() else "xla"


def record_run(function: str, backend: str) -> None:
    """Called from the code of a backend itself, so that `last_run` reports what ran and not what was asked for."""
    _last[function] = backend


def last_run(function: str) -> str | None:
    """Return the backend whose code was last traced for this public function; None before its first trace.

    A call that finds its compiled program in JAX's cache traces nothing and leaves this as it was.
    """
    return _last.get(function)


def device_kind() -> Literal["cpu", "gpu"]:
    """Return the kind of device an automatic plan aims at: JAX's default one, as shapes are all that tracing sees."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _no_hopper() -> str | None:
    """Return why the kernels cannot run on JAX's first device; None where they can."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform == "gpu" and capability.startswith("9."):
        return None
    found = f"{device.device_kind} ({capability})" if device.platform == "gpu" else device.platform
    return f"A Pallas kernel needs a Hopper GPU (compute capability 9.x), found {found}."

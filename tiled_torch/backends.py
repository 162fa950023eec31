"""Which backend is usable here and, if not, why not; and which one ran."""

import importlib.util
import os
from collections.abc import Mapping

import torch

from shared_specs.config import TORCH
from shared_specs.core import checks

_ran: dict[str, str] = {}

_INSTALLED = importlib.util.find_spec("triton") is not None
# What the kernels' tensor-core products and descriptors need: Ampere or newer.
_OLDEST = (8, 0)


def usable_backends() -> Mapping[str, str | None]:
    """Name of every backend -> None where it can run on this machine, else the reason.

    Example:
        >>> usable_backends()["eager"] is None
        True
    """
    return {"eager": None, "triton": _no_triton()}


def interpreting() -> bool:
    """Return whether Triton's interpreter runs the kernels, on any device and slowly: TRITON_INTERPRET=1 in the environment."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _no_triton() -> str | None:
    if not _INSTALLED:
        return "The triton package is not installed."
    if interpreting():
        return None
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "Its kernels need an NVIDIA GPU, and PyTorch finds none."
    found = torch.cuda.get_device_capability()
    if found < _OLDEST:
        return f"Its kernels need compute capability {_OLDEST[0]}.{_OLDEST[1]} or newer, this GPU has {found[0]}.{found[1]}."
    return None


def choose(function: str, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend that runs a call whose operands are on this device, in this compute dtype.

    A backend named explicitly runs or raises UnsupportedError; "auto" takes the kernels on a GPU that can run them.
    """
    reason = usable_backends()["triton"]
    if reason is None and dtype == torch.float64:
        reason = "Its kernels compute float32, bfloat16 and float16, and this call is float64."
    if reason is None and device.type != "cuda" and not interpreting():
        reason = f"Its kernels run on a GPU, and this call is on {device}."
    checks.check_backend(function, backend, TORCH, {"eager": None, "triton": reason})
    if backend == "auto":
        return "triton" if reason is None and device.type == "cuda" else "eager"
    return backend


def record_run(function: str, backend: str) -> None:
    """Note which backend a public function chose, for `last_run`."""
    _ran[function] = backend


# For torch.compile a call without a value: it would refuse the note inside a checkpoint, whose replay would write it again.
# This is what `torch.compiler.assume_constant_result` does, which loads the compiler: seconds, for whoever never compiles.
record_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


def last_run(function: str) -> str | None:
    """Return the backend that the last call of a public function ran on; None before the first call.

    Compiled code makes no calls: one counts when it is compiled.
    """
    return _ran.get(function)

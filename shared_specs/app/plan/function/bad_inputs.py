"""Every bad input of `plan` and `fits` once, with the message that both halves must raise before the model is read."""

from dataclasses import dataclass
from typing import Any

from shared_specs.app.plan.search import LONGEST
from shared_specs.errors import SpecError
from shared_specs.kernels.roofline import GPUS

_NAMES = ", ".join(GPUS)


@dataclass(frozen=True, kw_only=True)
class BadPlan:
    """arguments: what differs from a good call. message: without the function's name in front."""

    id: str
    arguments: dict[str, Any]
    message: str
    error: type[Exception] = SpecError


def _kind(name: str, value: Any, rule: str) -> BadPlan:
    message = f"{name} must be {rule}, got {type(value).__name__}."
    return BadPlan(id=f"{name}-{value}", arguments={name: value}, message=message, error=TypeError)


def _value(name: str, value: Any, rule: str) -> BadPlan:
    return BadPlan(id=f"{name}-{value}", arguments={name: value}, message=f"{name} must be {rule}, got {value}.")


BAD_PLANS = (
    BadPlan(
        id="model-is-a-name",
        arguments={"model": "llama-3-8b"},
        message="model must be a module, got str. Pass an nn.Module in PyTorch, an nnx.Module in JAX.",
        error=TypeError,
    ),
    _value("tokens", 0, f"between 1 and {LONGEST}"),
    _kind("tokens", 4096.0, "a whole number"),
    _value("devices", -1, f"between 1 and {LONGEST}"),
    _kind("devices", True, "a whole number"),
    _value("sequences", 0, f"between 1 and {LONGEST}"),
    _value("device_memory", "h300", f"one of {_NAMES}, or a size such as 80GB"),
    BadPlan(
        id="device_memory-512MiB",
        arguments={"device_memory": "512MiB"},
        message="device_memory must be at least 1GiB, got 512MiB, which is 536870912 bytes. Write for example 80GB.",
    ),
    BadPlan(
        id="device_memory-80",
        arguments={"device_memory": 80},
        message="device_memory must be at least 1GiB, got 80. Write for example 80GB.",
    ),
    _kind("device_memory", 8e10, f"a size such as 80GB, a number of bytes, or one of {_NAMES}"),
    BadPlan(
        id="host_memory-a-lot",
        arguments={"host_memory": "a lot"},
        message="host_memory must be a size, got 'a lot'. Write for example 512MiB or 2GB.",
    ),
    _value("dtype", "int4", "one of bfloat16, float32"),
    _value("optimizer", "lion", "one of adamw, adamw_8bit, sgd"),
)

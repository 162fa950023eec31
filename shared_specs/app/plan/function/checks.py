"""What `plan` and `fits` refuse, in both halves with the same words, before a model is read, and the plan of what is left."""

from collections.abc import Callable
from typing import Never

from shared_specs.app.option_fields import InputError, parse_size
from shared_specs.app.plan.decoder import Decoder, check_planned
from shared_specs.app.plan.function.report import ModelPlan
from shared_specs.app.plan.search import LEAST_MEMORY, LONGEST, memory_of, plan
from shared_specs.app.plan.setting import ITEMSIZE
from shared_specs.app.plan.step import MOMENTS
from shared_specs.config import Half
from shared_specs.errors import SpecError, fail, fail_type
from shared_specs.kernels.roofline import GPU, GPUS

_MODELS = "Pass an nn.Module in PyTorch, an nnx.Module in JAX."


def planned(
    function: str,
    half: Half,
    read: Callable[[], Decoder],
    tokens: int,
    *,
    devices: int,
    device_memory: str | int,
    host_memory: str | int | None,
    sequences: int,
    dtype: str,
    optimizer: str,
) -> ModelPlan:
    """Return the plan of a model. function: whose the messages are. read: returns the model's sizes and parameters.

    Raises:
        SpecError, TypeError: an argument is wrong.
    """
    for name, value in (("tokens", tokens), ("devices", devices), ("sequences", sequences)):
        _check_count(function, name, value)
    for name, value, known in (("dtype", dtype, ITEMSIZE), ("optimizer", optimizer, MOMENTS)):
        if not isinstance(value, str) or value not in known:
            fail(function, name, f"one of {', '.join(known)}", value)
    try:
        memory, gpu = _device(function, device_memory)
        host = None if host_memory is None else _bytes(function, "host_memory", host_memory)
        decoder = read()
        check_planned(decoder, half, devices, function, names=("model", "devices"))
        found = plan(
            decoder,
            tokens,
            memory=memory,
            host=host,
            gpus=devices,
            gpu=gpu,
            half=half,
            tp=1 if decoder.adapted else None,  # `parallelize` splits no adapters with the layers
            sequences=sequences,
            dtype=dtype,
            optimizer=optimizer,
        )
    except InputError as error:
        raise SpecError(str(error)) from None
    return ModelPlan(plan=found)


def fail_no_module(function: str, model: object) -> Never:
    """Raise TypeError for what is no model."""
    fail_type(function, "model", "a module", type(model).__name__, advice=_MODELS)


def check_loss_fn(function: str, loss_fn: object) -> None:
    """Raise TypeError for a loss that is no function."""
    if loss_fn is not None and not callable(loss_fn):
        fail_type(function, "loss_fn", "a function or None", type(loss_fn).__name__)


def _check_count(function: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail_type(function, name, "a whole number", type(value).__name__)
    if not 1 <= value <= LONGEST:
        fail(function, name, f"between 1 and {LONGEST}", value)


def _device(function: str, given: object) -> tuple[int, GPU | None]:
    if isinstance(given, str):
        return memory_of(given, f"{function}: device_memory")
    return _bytes(function, "device_memory", given), None


def _bytes(function: str, name: str, given: object) -> int:
    """Return the bytes of a size in words, or of a number of them."""
    if isinstance(given, bool) or not isinstance(given, int | str):
        words = f", or one of {', '.join(GPUS)}" if name == "device_memory" else ""
        fail_type(function, name, f"a size such as 80GB, a number of bytes{words}", type(given).__name__)
    size = parse_size(given, f"{function}: {name}") if isinstance(given, str) else given
    if size < LEAST_MEMORY:
        fail(function, name, "at least 1GiB", f"{given}", advice="Write for example 80GB.")
    return size

"""What JAX finds on this machine, for `doctor`."""

from functools import partial
from typing import Any

import jax

from shared_specs.app.doctor import Machine
from tiled_jax import backends
from tiled_jax.loss.api import choose_steps

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_WIDTHS: dict[str, Any] = dict(hidden=4096, intermediate=14336, out=4096, gated=True)  # Llama-3-8B's


def machine() -> Machine:
    """Return JAX's devices and what runs on them."""

    def no_kernel(dtype: str) -> str | None:
        from tiled_jax.core.mosaic import mlp_reason  # where no kernel runs, Mosaic is not loaded

        return mlp_reason(dtype, **_WIDTHS)

    automatic = {
        "tiled_mlp": {
            dtype: backends.choose("doctor", "auto", no_kernel=partial(no_kernel, dtype)) for dtype in _DTYPES
        },
        "tiled_linear_cross_entropy": {dtype: choose_steps("doctor", "auto", dtype).backend for dtype in _DTYPES},
    }
    devices = tuple(f"{device.device_kind} {device.id}" for device in jax.devices())
    return Machine(devices=devices, backends=backends.usable_backends(), automatic=automatic)

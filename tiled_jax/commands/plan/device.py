"""Devices that are not there: GPUs as JAX's compiler sees them where its CUDA plugin is, else parts of this processor."""

import os

import jax
import numpy as np

from shared_specs.app.options import InputError
from tiled_jax.plan.described import UNCHECKED, compiles_for_gpus, described_mesh

_LEAST = 8  # virtual devices: how many there are is said once, and a process may simulate several plans


def prepare(devices: int) -> None:
    """Make so many devices known; called before anything asks JAX for one.

    Raises:
        InputError: JAX has been asked before, and there are fewer.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    if compiles_for_gpus():
        os.environ[UNCHECKED] = "1"  # the plugin would stop at the missing cuDNN
        return
    try:
        jax.config.update("jax_num_cpu_devices", max(devices, _LEAST))
    except RuntimeError:  # devices have been made
        if jax.device_count() < devices:
            there = jax.device_count()
            raise InputError(
                f"plan: --gpus must be at most {there} with --simulate in this process, got {devices}."
            ) from None


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    """Return a mesh of these axes, of devices that are described, on machines of eight where there are more, or virtual."""
    if compiles_for_gpus():
        return described_mesh(sizes)
    count = int(np.prod(list(sizes.values())))
    return jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))

"""Devices that are not there: GPUs as JAX's compiler sees them where its CUDA plugin is, else parts of this processor."""

import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from shared_specs.app.options import InputError
from shared_specs.app.plan.search import NODE

# An H200: NVIDIA's data sheet and CUDA's table of compute capability 9.0; in the compiler's own text form.
TARGET = """gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
runtime_version { major: 13 minor: 0 patch: 0 }
dnn_version_info { major: 9 minor: 12 }
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""

_LEAST = 8  # virtual devices: how many there are is said once, and a process may simulate several plans


def compiles_for_gpus() -> bool:
    """Return whether JAX's CUDA plugin is here, which compiles for a GPU that is described to it."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def prepare(devices: int) -> None:
    """Make so many devices known; called before anything asks JAX for one.

    Raises:
        InputError: JAX has been asked before, and there are fewer.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    if compiles_for_gpus():
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would stop at the missing cuDNN
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
    count = int(np.prod(list(sizes.values())))
    if compiles_for_gpus():
        machines = count // NODE if count % NODE == 0 else 1
        placed = f"{machines}x{count // machines}x1"
        described: Any = topologies.get_topology_desc("h200", "cuda", target_config=TARGET, topology=placed)
        return topologies.make_mesh(described, tuple(sizes.values()), tuple(sizes))
    return jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))

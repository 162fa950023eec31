"""GPUs that are not there, as JAX's compiler sees them where its CUDA plugin is."""

import importlib.util
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.experimental import topologies

from shared_specs.app.plan.setting import NODE

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

# Of a program: without a device there is nothing to tune on, and Triton's products have no sizes but those that tuning finds.
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # variable with which the plugin starts where there is no GPU


def compiles_for_gpus() -> bool:
    """Return whether JAX's CUDA plugin is here, which compiles for a GPU that is described to it."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def described_mesh(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """Return a mesh of these axes, of devices that are described, on machines of eight where there are more.

    Raises:
        Exception: JAX has started without the plugin, which stops at a missing cuDNN unless `UNCHECKED` is set; of JAX.
    """
    os.environ[UNCHECKED] = "1"
    count = prod(sizes.values())
    machines = count // NODE if count % NODE == 0 else 1
    placed = f"{machines}x{count // machines}x1"
    described: Any = topologies.get_topology_desc("h200", "cuda", target_config=TARGET, topology=placed)
    return topologies.make_mesh(described, tuple(sizes.values()), tuple(sizes))

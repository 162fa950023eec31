"""An H200 as JAX's compiler sees it: the target, shapes on it, compiled programs, and what their kernels need."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# NVIDIA's data sheet and CUDA's table of compute capability 9.0; in the compiler's own text form.
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
SHARED_LIMIT = 232_448


def _sharding() -> NamedSharding:
    topology = topologies.get_topology_desc("h200", "cuda", target_config=TARGET, topology="1x1x1")
    return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())


_ON_H200 = _sharding()
MESH = _ON_H200.mesh


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=_ON_H200)


def compiled(fn: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> Any:
    """The program; without a device there is nothing to tune on."""
    return jax.jit(fn).lower(*shapes).compile({"xla_gpu_autotune_level": 0})


def kernels(dump: Path, known: set[str]) -> Iterator[dict[str, Any]]:
    """What every Mosaic kernel needs that was compiled since `known` was filled; adds them to it."""
    for log in sorted(dump.glob("*.ptxas")):
        if log.name in known:
            continue
        known.add(log.name)
        text, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
        resources = log.with_suffix(".resources.txt").read_text()

        def number(pattern: str, text: str = text) -> int:
            found = re.search(pattern, text)
            assert found is not None, f"ptxas says nothing of {pattern}: {text}"
            return int(found[1])

        yield {
            "registers": number(r"Used (\d+) registers"),
            "spilled_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "shared_bytes": number(r"smem_scratch_bytes=(\d+)", resources),
            "serialized": text.count("serialized"),  # of ptxas: products one after the other, each waited for
            "wgmma": ptx.count("wgmma.mma_async"),
            "tma": ptx.count("cp.async.bulk.tensor"),
            "target": number(r"\.target sm_(\d+)a", ptx),
        }

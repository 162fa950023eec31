"""`bench --device gpu` in JAX: the kernels against XLA, then whole MLPs and losses against their plain forms and tokamax."""

from shared_specs.app.gpu.bench import bench_on_gpu
from shared_specs.app.options import BenchOptions

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "tokamax")


def bench_gpu(options: BenchOptions) -> int:
    """One part of `make gpu`. What touches the GPU runs in processes of its own: `worker.py`."""
    return bench_on_gpu(options, "tiled_jax", PACKAGES)

"""`bench --device gpu` in PyTorch: kernels against the vendor's library, then whole MLPs and losses against peers."""

from shared_specs.app.gpu.bench import bench_on_gpu
from shared_specs.app.options import BenchOptions

PACKAGES = ("torch", "triton", "liger-kernel", "deepspeed", "quack-kernels")
PEER_NOTE = (
    "liger runs its own sharding function with its fused SwiGLU; deepspeed runs its own on the plain PyTorch MLP, as its users "
    "do; quack is not sharded and takes its default block sizes"
)


def bench_gpu(options: BenchOptions) -> int:
    """One part of `make gpu`. What touches the GPU runs in processes of its own: `worker.py`."""
    return bench_on_gpu(options, "tiled_torch", PACKAGES, peers=PEER_NOTE)

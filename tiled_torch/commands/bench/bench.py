"""The PyTorch half of `bench`: which module measures which operation."""

from shared_specs.app.bench.bench import Op, run_bench
from shared_specs.app.options import BenchOptions, InputError
from tiled_torch.commands.bench import accuracy, loss, mlp, model

OPS: dict[str, Op] = {"mlp": mlp, "loss": loss, "accuracy": accuracy, "model": model}


def bench(options: BenchOptions) -> int:
    """Measure one operation; see `run_bench`."""
    if options.device == "gpu":
        from tiled_torch.commands.gpu.bench import bench_gpu

        return bench_gpu(options)
    if options.op == "mesh":
        raise InputError("bench: --op mesh is of tiled_jax alone: in PyTorch every rank has its own tokens anyway.")
    return run_bench(options, "torch", OPS)

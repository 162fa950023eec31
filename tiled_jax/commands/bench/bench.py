"""The JAX half of `bench`: which module measures which operation."""

from shared_specs.app.bench.bench import Op, run_bench
from shared_specs.app.options import BenchOptions
from tiled_jax.commands.bench import accuracy, loss, mesh, mlp, model

OPS: dict[str, Op] = {"mlp": mlp, "loss": loss, "accuracy": accuracy, "mesh": mesh, "model": model}


def bench(options: BenchOptions) -> int:
    """Measure one operation; see `run_bench`."""
    if options.device == "gpu":
        from tiled_jax.commands.gpu.bench import bench_gpu

        return bench_gpu(options)
    if options.op == "mesh":
        mesh.check_devices()
    return run_bench(options, "jax", OPS)

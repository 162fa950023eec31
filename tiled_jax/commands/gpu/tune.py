"""`python -m tiled_jax tune`: measures the Pallas kernels' block sizes for one model's widths for the user's table.

What touches the GPU runs in processes of its own: `worker.py`.
"""

from shared_specs.app.bench.tune import tune_on_gpu
from shared_specs.app.options import InputError, TuneOptions
from tiled_jax.commands.gpu.bench import PACKAGES


def tune(options: TuneOptions) -> int:
    """Measures on the GPU at hand; InputError without one that has kernels."""
    if options.dtype == "float32" and not options.toy:
        raise InputError("tune: --dtype must be bfloat16 or float16, the kernels' dtypes, got float32.")
    return tune_on_gpu(options, "pallas", "tiled_jax", PACKAGES, ("up", "down"))

"""`python -m tiled_jax tune`: measures the Pallas kernels' block sizes for one model's widths and writes them to the table.

What touches the GPU runs in processes of its own: `worker.py`.
"""

from dataclasses import replace
from pathlib import Path

from shared_specs.app.bench.tune import TOY, tune_on_gpu
from shared_specs.app.options import InputError, TuneOptions
from shared_specs.kernels.blocks import TUNED
from tiled_jax.commands.gpu.bench import PACKAGES


def tune(options: TuneOptions, table: Path | None = None) -> int:
    """Measures on the GPU at hand; InputError without one that has kernels. table: the project's own where none is named."""
    if options.toy:
        options = replace(options, **TOY)
    elif options.dtype == "float32":
        raise InputError("tune: --dtype must be bfloat16 or float16, the kernels' dtypes, got float32.")
    h, i = options.hidden, options.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "dgated": (i, h),
        "glu_up": (i, h),
        "glu_up_aux": (i, h),
        "cross_entropy": (options.vocab,),
        "linear": (h, i),
        "dx": (h, i),
        "weight_gradient": (h, i),
        "glu_elementwise": (i,),
    }
    return tune_on_gpu(options, "pallas", "tiled_jax", PACKAGES, shapes, ("up", "down"), table or Path(TUNED))

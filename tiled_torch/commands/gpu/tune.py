"""`python -m tiled_torch tune`: measures the kernels' block sizes for one model's widths and writes them to the table.

For every op the candidates of `shared_specs.kernels.blocks` run interleaved on one shard of random data, on buffers of
their own: kernels that work in place never see live values. Then the ways to make the MLP are compared with the chosen
blocks. All of that happens in processes of their own: `worker.py`.
"""

from dataclasses import replace
from pathlib import Path

from shared_specs.app.bench.tune import TOY, WAYS, tune_on_gpu
from shared_specs.app.options import TuneOptions
from shared_specs.kernels.blocks import TUNED
from tiled_torch.commands.gpu.bench import PACKAGES


def tune(options: TuneOptions, table: Path | None = None) -> int:
    """Measures on the GPU at hand; InputError without one. table: the project's own where none is named."""
    if options.toy:
        options = replace(options, **TOY)
    h, i = options.hidden, options.intermediate
    # As the launch wrappers ask: see blocks_for.
    shapes: dict[str, tuple[int, ...]] = {
        "dgated": (i, h),
        "glu_up": (i, h),
        "glu_up_aux": (i, h),
        "cross_entropy": (options.vocab,),
        "linear": (h, i),
        "dx": (h, i),
        "weight_gradient": (i, h),
        "glu_elementwise": (i,),
    }
    return tune_on_gpu(options, "triton", "tiled_torch", PACKAGES, shapes, WAYS, table or Path(TUNED))

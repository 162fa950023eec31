"""`python -m tiled_torch tune`: measures the kernels' block sizes for one model's widths and writes them to the user's table.

For every op the candidates of `shared_specs.kernels.blocks` run interleaved on one shard of random data, on buffers of
their own: kernels that work in place never see live values. Then the ways to make the MLP are compared with the chosen
blocks. All of that happens in processes of their own: `worker.py`.
"""

from shared_specs.app.bench.tune import WAYS, tune_on_gpu
from shared_specs.app.options import TuneOptions
from tiled_torch.commands.gpu.bench import PACKAGES


def tune(options: TuneOptions) -> int:
    """Measures on the GPU at hand; InputError without one."""
    return tune_on_gpu(options, "triton", "tiled_torch", PACKAGES, WAYS)

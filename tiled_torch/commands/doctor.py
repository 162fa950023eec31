"""What PyTorch finds on this machine, for `doctor`."""

import torch

from shared_specs.app.doctor import Machine
from tiled_torch import backends

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def machine() -> Machine:
    """Return PyTorch's devices and what runs on the first of them."""
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    device = torch.device("cuda" if gpus else "cpu")
    taken = {dtype: backends.choose("doctor", "auto", device, getattr(torch, dtype)) for dtype in _DTYPES}
    automatic = {"tiled_mlp": taken, "tiled_linear_cross_entropy": taken}
    cpu = f"a CPU with {torch.get_num_threads()} threads"
    return Machine(devices=gpus or (cpu,), backends=backends.usable_backends(), automatic=automatic)

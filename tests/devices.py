"""Whether there is an NVIDIA GPU that CUDA can be used on, asked before any framework is imported."""

import ctypes
from functools import cache


@cache
def has_cuda() -> bool:
    """Asked of the driver's library itself: its device files have other names, or are hidden, where machines are virtual.

    `cuDeviceGetCount` makes no context and takes no memory of the device. CUDA_VISIBLE_DEVICES="" hides every GPU.
    """
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False

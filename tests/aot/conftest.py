"""Compiling for an H200 on a machine without a GPU: what has to be in the environment before jax is imported.

Only `make aot` collects this folder, in an environment that has JAX's CUDA plugin.
"""

import os
import tempfile
from pathlib import Path

DUMP = Path(tempfile.mkdtemp(prefix="aot-"))

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would stop at the missing cuDNN
os.environ.update(MOSAIC_GPU_DUMP_TO=str(DUMP), MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1")

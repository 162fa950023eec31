"""Token-wise layers of long-context training, computed shard by shard, exactly, in JAX.

Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> x, mlp = jnp.ones((2, 5, 8)), TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0))
    >>> mlp(x).shape
    (2, 5, 8)
"""

from shared_specs.config import (
    Checkpointing,
    Compile,
    DataParallel,
    LossOptions,
    LossResult,
    ParallelConfig,
    ParallelLinearOptions,
    TensorParallel,
    Tiling,
)
from shared_specs.errors import SpecError, UnsupportedError
from tiled_jax.backends import usable_backends
from tiled_jax.functional import tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp
from tiled_jax.modules import TiledLinear, TiledLinearCrossEntropy, TiledLinearReturnBias, TiledMLP, linen
from tiled_jax.parallel import parallelize, vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = [
    "Checkpointing",
    "Compile",
    "DataParallel",
    "LossOptions",
    "LossResult",
    "ParallelConfig",
    "ParallelLinearOptions",
    "SpecError",
    "TensorParallel",
    "TiledLinear",
    "TiledLinearCrossEntropy",
    "TiledLinearReturnBias",
    "TiledMLP",
    "Tiling",
    "UnsupportedError",
    "linen",
    "parallelize",
    "tile",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

"""Token-wise layers of long-context training, computed shard by shard, exactly, in JAX.

Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> x, mlp = jnp.ones((2, 5, 8)), TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0))
    >>> mlp(x).shape
    (2, 5, 8)
"""

from shared_specs.config import LossOptions, LossResult, Tiling
from shared_specs.errors import SpecError, UnsupportedError
from tiled_jax.backends import usable_backends
from tiled_jax.functional import tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp
from tiled_jax.modules import TiledLinearCrossEntropy, TiledMLP, linen
from tiled_jax.parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = [
    "LossOptions",
    "LossResult",
    "SpecError",
    "TiledLinearCrossEntropy",
    "TiledMLP",
    "Tiling",
    "UnsupportedError",
    "linen",
    "tile",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

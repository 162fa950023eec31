"""Token-wise layers of long-context training, computed shard by shard, exactly, in JAX.

Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> x, mlp = jnp.ones((2, 5, 8)), TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0))
    >>> mlp(x).shape
    (2, 5, 8)
"""

from shared_specs.config import Tiling
from shared_specs.errors import SpecError, UnsupportedError
from tiled_jax.backends import usable_backends
from tiled_jax.functional import tile, tiled_mlp
from tiled_jax.modules import TiledMLP, linen

__all__ = ["SpecError", "TiledMLP", "Tiling", "UnsupportedError", "linen", "tile", "tiled_mlp", "usable_backends"]

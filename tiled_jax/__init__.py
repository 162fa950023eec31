"""Token-wise layers of long-context training, computed shard by shard, exactly, in JAX.

Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from tiled_jax import TiledMLP
    >>> x, mlp = jnp.ones((2, 5, 8)), TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0))
    >>> mlp(x).shape
    (2, 5, 8)
"""

from typing import TYPE_CHECKING

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
from shared_specs.core.lazy import import_lazily
from shared_specs.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    __version__: str
    from tiled_jax.backends import usable_backends
    from tiled_jax.check.api import check
    from tiled_jax.functional import (
        tile,
        tiled_distillation_loss,
        tiled_linear_cross_entropy,
        tiled_loss,
        tiled_mlp,
        tiled_moe,
    )
    from tiled_jax.models.model_loss import tiled_model_loss
    from tiled_jax.models.tiling import tile_model, tiling_paths, untile_model
    from tiled_jax.modules import TiledLinear, TiledLinearCrossEntropy, TiledLinearReturnBias, TiledMLP, TiledMoE, linen
    from tiled_jax.parallel import parallelize, vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
    from tiled_jax.plan.api import fits, plan

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
    "TiledMoE",
    "Tiling",
    "UnsupportedError",
    "check",
    "fits",
    "linen",
    "parallelize",
    "plan",
    "tile",
    "tile_model",
    "tiled_distillation_loss",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "tiled_model_loss",
    "tiled_moe",
    "tiling_paths",
    "untile_model",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

_MODULES = {
    "backends": ("usable_backends",),
    "check.api": ("check",),
    "functional": (
        "tile",
        "tiled_distillation_loss",
        "tiled_linear_cross_entropy",
        "tiled_loss",
        "tiled_mlp",
        "tiled_moe",
    ),
    "models.model_loss": ("tiled_model_loss",),
    "models.tiling": ("tile_model", "tiling_paths", "untile_model"),
    "modules": ("TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP", "TiledMoE", "linen"),
    "plan.api": ("fits", "plan"),
    "parallel": ("parallelize", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"),
}
import_lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})

"""Modules of the JAX half by an old name of their room: `tiled_jax` has them too."""

import sys

from tiled_jax.linear import module as _linear
from tiled_jax.linear.module import TiledLinear, TiledLinearReturnBias
from tiled_jax.loss import module as _loss
from tiled_jax.loss.module import TiledLinearCrossEntropy
from tiled_jax.mlp import module as _mlp
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.modules import linen
from tiled_jax.moe.module import TiledMoE

__all__ = ["TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP", "TiledMoE", "linen"]

# Pickles name the files that classes stood in.
_FILES = {"linear": _linear, "loss": _loss, "mlp": _mlp}
sys.modules.update({f"{__name__}.{old}": module for old, module in _FILES.items()})

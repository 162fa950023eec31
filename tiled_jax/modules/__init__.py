"""Modules: parameters, options and one call; no math."""

from tiled_jax.modules import linen
from tiled_jax.modules.linear import TiledLinear, TiledLinearReturnBias
from tiled_jax.modules.loss import TiledLinearCrossEntropy
from tiled_jax.modules.mlp import TiledMLP

__all__ = ["TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP", "linen"]

"""The Flax linen modules: `TiledMLP`, `TiledLinear`, `TiledLinearReturnBias` and `TiledLinearCrossEntropy`."""

from tiled_jax.linear.linen import TiledLinear, TiledLinearReturnBias
from tiled_jax.loss.linen import TiledLinearCrossEntropy
from tiled_jax.mlp.linen import TiledMLP

__all__ = ["TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP"]

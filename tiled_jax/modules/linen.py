"""The Flax linen modules: `TiledMLP`, `TiledMoE`, `TiledLinear`, `TiledLinearReturnBias` and `TiledLinearCrossEntropy`."""

from tiled_jax.linear.linen import TiledLinear, TiledLinearReturnBias
from tiled_jax.loss.linen import TiledLinearCrossEntropy
from tiled_jax.mlp.linen import TiledMLP
from tiled_jax.moe.linen import TiledMoE

__all__ = ["TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP", "TiledMoE"]

"""The functions: checks, the plan, and the only differentiation rules of the package."""

from tiled_jax.functional.any_loss import tiled_loss
from tiled_jax.functional.loss import tiled_linear_cross_entropy
from tiled_jax.functional.mlp import tiled_mlp
from tiled_jax.functional.tile import tile

__all__ = ["tile", "tiled_linear_cross_entropy", "tiled_loss", "tiled_mlp"]

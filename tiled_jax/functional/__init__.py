"""The functions: checks, the plan, and the only differentiation rules of the package."""

from tiled_jax.functional.mlp import tiled_mlp
from tiled_jax.functional.tile import tile

__all__ = ["tile", "tiled_mlp"]

"""Public functions of the JAX half by an old name of their room: `tiled_jax` has them too."""

from tiled_jax.distillation.api import tiled_distillation_loss
from tiled_jax.loss.api import tiled_linear_cross_entropy
from tiled_jax.mlp.api import tiled_mlp
from tiled_jax.moe.api import tiled_moe
from tiled_jax.tile.api import tile
from tiled_jax.tile.loss import tiled_loss

__all__ = ["tile", "tiled_distillation_loss", "tiled_linear_cross_entropy", "tiled_loss", "tiled_mlp", "tiled_moe"]

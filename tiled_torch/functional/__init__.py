"""Public functions of the PyTorch half by an old name of their room: `tiled_torch` has them too."""

from tiled_torch.distillation.api import tiled_distillation_loss as tiled_distillation_loss
from tiled_torch.loss.api import tiled_linear_cross_entropy as tiled_linear_cross_entropy
from tiled_torch.mlp.api import tiled_mlp as tiled_mlp
from tiled_torch.moe.api import tiled_moe as tiled_moe
from tiled_torch.tile.api import tile as tile
from tiled_torch.tile.loss import tiled_loss as tiled_loss

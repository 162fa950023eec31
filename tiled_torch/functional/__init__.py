"""Public functions of the PyTorch half and the only autograd code."""

from tiled_torch.functional.any_loss import tiled_loss as tiled_loss
from tiled_torch.functional.loss import tiled_linear_cross_entropy as tiled_linear_cross_entropy
from tiled_torch.functional.mlp import tiled_mlp as tiled_mlp
from tiled_torch.functional.tile import tile as tile

"""Public functions of the PyTorch half and the only autograd code."""

from tiled_torch.functional.mlp import tiled_mlp as tiled_mlp
from tiled_torch.functional.tile import tile as tile

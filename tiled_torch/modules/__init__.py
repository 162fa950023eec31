"""Parameters and options around one functional call each; no math."""

from tiled_torch.modules.linear import TiledLinear as TiledLinear
from tiled_torch.modules.linear import TiledLinearReturnBias as TiledLinearReturnBias
from tiled_torch.modules.loss import TiledLinearCrossEntropy as TiledLinearCrossEntropy
from tiled_torch.modules.mlp import TiledMLP as TiledMLP

"""Modules of the PyTorch half by an old name of their room: `tiled_torch` has them too."""

import sys

from tiled_torch.linear import module as _linear
from tiled_torch.linear.module import TiledLinear as TiledLinear
from tiled_torch.linear.module import TiledLinearReturnBias as TiledLinearReturnBias
from tiled_torch.loss import module as _loss
from tiled_torch.loss.module import TiledLinearCrossEntropy as TiledLinearCrossEntropy
from tiled_torch.mlp import module as _mlp
from tiled_torch.mlp.module import TiledMLP as TiledMLP
from tiled_torch.moe.module import TiledMoE as TiledMoE

# Pickles name the files that classes stood in.
_FILES = {"linear": _linear, "loss": _loss, "mlp": _mlp}
sys.modules.update({f"{__name__}.{old}": module for old, module in _FILES.items()})

"""DeepSpeed's tiled computations and tiled linear layers by their own names: signatures, override points, exceptions."""

from tiled_torch.compat.deepspeed_linear import TiledLinear as TiledLinear
from tiled_torch.compat.deepspeed_linear import TiledLinearReturnBias as TiledLinearReturnBias
from tiled_torch.compat.deepspeed_tiles import SequenceTiledCompute as SequenceTiledCompute
from tiled_torch.compat.deepspeed_tiles import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from tiled_torch.compat.deepspeed_tiles import TiledMLP as TiledMLP
from tiled_torch.compat.deepspeed_tiles import sequence_tiled_compute as sequence_tiled_compute

"""LongCat-Flash: what chooses an expert beyond those that have weights is handed on as it is, times the weight of the choice.

The formula leaves those choices out, since nobody has their number (`Routes`). Here is what they add.
"""

from typing import Any

from torch import Tensor

from shared_specs.config import Tiling
from tiled_torch.tile.api import tile

PASSING = frozenset({"LongcatFlashExperts"})
IDENTITY = ("identity_expert",)


def handed_on(experts: Any, x: Tensor, index: Tensor, weights: Tensor, tiling: Tiling) -> Tensor:
    """Return x times the sum of the weights of what is handed on, [T, H] in the dtype of x."""
    chosen = (weights * (index >= experts.num_routed_experts)).sum(-1, keepdim=True)
    return tile(_times, tiling=tiling)(x, chosen)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).to(x.dtype)

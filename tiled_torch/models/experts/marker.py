"""The marker of classes that `tile_model` gives to a mixture of experts: its experts, its router, its block."""

from torch import nn

from tiled_torch.models.pickling import Remade


class OfExperts(Remade):
    """Comes before the original class in the order of methods."""

    _untiled: type[nn.Module]

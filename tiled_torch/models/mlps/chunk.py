"""Layers whose MLP is a method: BERT's and its relatives', where `feed_forward_chunk` calls two modules, a norm and a residual.

transformers itself calls that method for a few tokens at a time (`chunk_size_feed_forward`), which says that it is token-wise;
a probe looks.
"""

from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from shared_specs.config import Tiling
from tiled_torch.core.partitioned import is_partitioned
from tiled_torch.models.mlps.probe import reason_not_token_wise
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import report, state_seen
from tiled_torch.tile.api import tile_where

METHOD = "feed_forward_chunk"
GATHERED = "a ZeRO-3 engine would gather its weights for every shard"


def has_chunk(module: nn.Module) -> bool:
    """Return whether a layer computes its MLP in a method."""
    return callable(getattr(type(module), METHOD, None))


def reason_not_chunk(module: nn.Module) -> str | None:
    """Return why a layer's method cannot be computed shard by shard; None where it can."""
    if METHOD in vars(module):
        return f"its {METHOD} is one of its own"
    return reason_not_token_wise(module, lambda twin: getattr(twin, METHOD))


class TiledChunk(Remade):
    """A layer whose `feed_forward_chunk` runs through `tile`; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _ran: str | None = None

    def feed_forward_chunk(self: Any, *args: Any) -> Any:
        whole = MethodType(self._untiled.feed_forward_chunk, self)
        path = chunk_path(self)
        report(self, path)
        if path.startswith("untiled"):
            return whole(*args)
        return tile_where(whole, self._tiling, state_seen(self))(*args)


def chunk_path(layer: nn.Module) -> str:
    """Return how such a layer's MLP would run now."""
    split = any(map(is_partitioned, layer.parameters()))
    return f"untiled: {GATHERED}" if split else f"tile: the MLP is its {METHOD}"


@cache
def chunk_class(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `untiled` whose `feed_forward_chunk` is tiled."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(chunk_class)}
    return type(untiled.__name__, (TiledChunk, untiled), attributes)

"""How a module whose class was made while running is pickled and copied: by the class that it had before, and the maker."""

from collections.abc import Callable
from typing import Any

from torch import nn

Maker = Callable[[type[nn.Module]], type[nn.Module]]


class Remade:
    """Marker of such classes; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _made_by: Maker

    def __reduce_ex__(self, protocol: Any) -> Any:
        made_by = type(self)._made_by
        if type(self) is not made_by(self._untiled):  # a class made by somebody else since then, as by fully_shard
            return super().__reduce_ex__(protocol)
        return _empty, (made_by, self._untiled), self.__getstate__()


def _empty(made_by: Maker, untiled: type[nn.Module]) -> nn.Module:
    made = made_by(untiled)
    return made.__new__(made)

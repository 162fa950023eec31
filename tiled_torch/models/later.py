"""Outputs of a compiled forward: torch.compile cannot trace the making of a lazy tensor, so it is made on the first look.

The graph returns the hidden states, and the outputs know which head makes logits of them.
"""

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from shared_specs.config import LossOptions
from tiled_torch.models.logits import adjusted, lazy_logits


class LaterOutputs:
    """The operands that the logits are made from. versions: of the head's parameters, as the forward found them."""

    def __init__(self, model: Any, rows: Tensor, options: LossOptions, cast: torch.dtype | None) -> None:
        self.model, self.rows, self.options, self.cast = model, rows, options, cast
        self.versions = [parameter._version for parameter in model.lm_head.parameters()]

    def logits(self) -> Tensor:
        if torch.compiler.is_compiling():  # a tuple is asked for inside the graph
            return adjusted(self.model.lm_head(self.rows), self.options)
        changed = [parameter._version for parameter in self.model.lm_head.parameters()] != self.versions
        return lazy_logits(self.model, self.rows, self.options, self.cast, changed=changed)


class Later:
    """Every way to look at a value of a ModelOutput, with the logits put into their place before.

    The place is there from the start: keys and length, which compilers guard on, are the same before and after.
    """

    def _settle(self: Any) -> None:
        pending = self.__dict__.pop("_pending", None)
        if pending is not None:
            OrderedDict.__setitem__(self, "logits", pending.logits())

    def _wait(self: Any, pending: LaterOutputs) -> None:
        """Let the logits be made by `pending`, on the first look."""
        later = [name for name in OrderedDict.keys(self) if name != "loss"]
        OrderedDict.__setitem__(self, "logits", None)
        for name in later:
            OrderedDict.move_to_end(self, name)
        self._pending = pending

    @property
    def logits(self: Any) -> Tensor | None:
        self._settle()
        return OrderedDict.get(self, "logits")

    @logits.setter
    def logits(self: Any, value: Any) -> None:
        """The attribute is the item, which ModelOutput sets besides."""

    def __getitem__(self: Any, key: Any) -> Any:
        if key != "loss":  # nor do a compiler's guards on the loss
            self._settle()
        return super().__getitem__(key)  # type: ignore[misc]

    def get(self: Any, key: Any, default: Any = None) -> Any:
        self._settle()
        return super().get(key, default)  # type: ignore[misc]

    def values(self: Any) -> Any:
        self._settle()
        return super().values()  # type: ignore[misc]

    def items(self: Any) -> Any:
        self._settle()
        return super().items()  # type: ignore[misc]

    def __reduce__(self: Any) -> Any:
        """As the class that a user knows."""
        known = next(base for base in type(self).__mro__ if not issubclass(base, Later))
        return known, tuple(getattr(self, name) for name in known.__dataclass_fields__)  # type: ignore[attr-defined]


@cache
def later_outputs(known: type[ModelOutput]) -> type[Any]:
    """Return the subclass of `known` whose logits come later, under the same name."""
    return type(known.__name__, (Later, known), {"__module__": known.__module__})

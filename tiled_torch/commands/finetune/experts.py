"""Weights of experts: arrays of each expert in a model folder, one parameter of all experts of a layer in transformers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shared_specs.app.finetune.stored import Array
from shared_specs.app.models.decoders import DECODERS

_FREE = slice(None)


class FolderNames:
    """Gives the arrays of a model folder the names of the parameters that transformers makes of them, and back.

    Parameters have the arrays' own names but for those of a mixture of experts: `mlp.gate.weight` [E, H] is the router,
    `mlp.experts.gate_up_proj` [E, 2 I, H] holds the gate of every expert above its up, `mlp.experts.down_proj` [E, H, I].
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: complete, as `model_config.complete_config` makes it."""
        self._routers: dict[str, str] = {}
        self._of_experts: dict[str, list[list[str]]] = {}
        terms = DECODERS[config["model_type"]].experts
        if terms is None:
            return
        projections = {"gate_up_proj": (terms.gate, terms.up), "down_proj": (terms.down,)}
        for layer in range(config["num_hidden_layers"]):
            ours, theirs = f"model.layers.{layer}.mlp", f"model.layers.{layer}.{terms.inside}"
            self._routers[f"{ours}.gate.weight"] = f"{theirs}.gate.weight"
            for name, parts in projections.items():
                self._of_experts[f"{ours}.experts.{name}"] = [
                    [f"{theirs}.experts.{expert}.{part}.weight" for part in parts]
                    for expert in range(config[terms.count])
                ]

    def parameters(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays by the names of the parameters; those of experts are put together where they are read."""
        found: dict[str, Array] = dict(arrays)
        for parameter, name in self._routers.items():
            found[parameter] = found.pop(name)
        for parameter, names in self._of_experts.items():
            found[parameter] = _Stacked([[found.pop(name) for name in of_one] for of_one in names])
        return found

    def arrays(self, parameter: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the arrays that a parameter is made of, views of it, with their names."""
        if parameter not in self._of_experts:
            yield self._routers.get(parameter, parameter), whole
            return
        for names, of_one in zip(self._of_experts[parameter], whole, strict=True):
            yield from zip(names, of_one.chunk(len(names)), strict=True)


class _Stacked:
    """The arrays of all experts of a layer as one [experts, rows, columns]; those of one expert lie one above the other."""

    def __init__(self, each: Sequence[Sequence[Array]]) -> None:
        self._each = each
        rows = sum(array.shape[0] for array in each[0])
        self.shape = (len(each), rows, each[0][0].shape[1])

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return what a tuple of slices, or `...`, selects: a new array, filled expert by expert."""
        experts, rows, columns = (_FREE, _FREE, _FREE) if index is ... else index
        taken = self._each[experts]
        sizes = [len(range(*part.indices(size))) for part, size in zip((rows, columns), self.shape[1:], strict=True)]
        found = np.empty((len(taken), *sizes), np.float32)
        for place, arrays in zip(found, taken, strict=True):
            place[...] = np.concatenate([array[...] for array in arrays])[rows, columns]
        return found

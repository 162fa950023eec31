"""An MLP of a Hugging Face model whose forward is tiled: a subclass of its class, with the same attributes and parameters."""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from shared_specs.config import Activation, Tiling
from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.core import partitioned
from tiled_torch.mlp.api import tiled_mlp
from tiled_torch.models.family import (
    ACTIVATION_CLASSES,
    Family,
    activation_of,
    reason_called,
    reason_linear_is_not_plain,
)
from tiled_torch.models.llama import LLAMA
from tiled_torch.models.mlps.found import OTHER, Found
from tiled_torch.models.phi3 import PHI3
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import note_layers, report, state_seen, tell_of_part
from tiled_torch.tile.api import tile_where

FAMILIES = (LLAMA, PHI3)


def path_now(mlp: Any) -> str:
    """Return how a tiled MLP would run now."""
    if mlp._run_split is not None:
        return "tensor_parallel_mlp"
    reason = reason_not_plain(mlp)
    return "tiled_mlp" if reason is None else f"tile: {reason}"


def note_made(model: nn.Module) -> None:
    """Take how the MLPs of a model would run now for what was asked for: of another path a warning tells."""
    for module in model.modules():
        if isinstance(module, Tiled):
            module._made = path_now(module)


def family_of(module: nn.Module) -> Family | None:
    """Return the family a module belongs to, by the name of its class or of the class it had before tiling or sharding."""
    if not any(hasattr(module, family.projections[0]) for family in FAMILIES):
        return None
    names = {base.__name__ for base in type(module).__mro__}
    return next((family for family in FAMILIES if names & family.classes), None)


def known_of(module: nn.Module) -> Family | Found | None:
    """Return what is known of a module's MLP: what a probe found, or the family that it belongs to."""
    return vars(module).get("_found") or family_of(module)


def reason_not_plain(module: nn.Module) -> str | None:
    """Return why a projection is more than its weight and bias; None where every one is a plain linear layer."""
    family = known_of(module)
    if isinstance(family, Found):
        return family.reason(module)
    reasons = (
        reason_linear_is_not_plain(name, getattr(module, name), gathered=True)
        for name in (family.projections if family else ())
    )
    return next((reason for reason in (*reasons, _reason_of_activation(module, family)) if reason is not None), None)


def _reason_of_activation(module: nn.Module, family: Family | None) -> str | None:
    """Return why what a module calls between its projections is not what `tile_model` found there."""
    if family is None:
        return None
    name, activation = family.activation, getattr(module, family.activation)
    if activation_of(activation) is None:
        kind = type(activation)
        return f"{name} is {f'{kind.__module__}.' if kind.__name__ in ACTIVATION_CLASSES else ''}{kind.__name__}"
    return reason_called(name, activation, gathered=True)


class Tiled(Remade):
    """Marker and forward of a tiled MLP; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _run_split: Callable[[Any], Any] | None = (
        None  # what `parallelize` lets run where the projections are split over ranks
    )
    _ran: str | None = None
    _told: tuple[str, ...] = ()
    _heard: set[str]  # what was warned of, one set for a model
    _made: str  # the path that it had when it was made
    _leaf: bool | None = None
    _found: Found | None = None
    _model_name: str = (
        ""  # of the causal language model, in one MLP of it, which sees whether the model's own forward is used
    )
    _alone: bool = False

    @property
    def _z3_leaf(self: Any) -> bool:
        """Return the answer to ZeRO-3's question to a module: whether all that is inside is gathered around all shards,
        without hooks of its own.

        Where the projections are called, that is; where only their weights are used, `gather_around` is enough, and has none
        of a leaf's limits. It stays as it was when the engine's hooks were made.
        """
        if self._leaf is None:
            family = known_of(self)
            has_hooks = family is not None and partitioned.gathers(getattr(self, family.projections[0]))
            self._leaf = not has_hooks and reason_not_plain(self) is not None
        return self._leaf

    @_z3_leaf.setter
    def _z3_leaf(self, flag: bool) -> None:
        self._leaf = flag

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        partitioned.refuse_early_gradient(self, args)  # type: ignore[arg-type]  # a mixin of modules
        path = path_now(self)
        if path.startswith("tile: ") and path != getattr(self, "_made", path):
            tell_of_part(self, "runs through tile, which recomputes all of it", path.removeprefix("tile: "))
        if path == "tiled_mlp" and (kwargs or len(args) != 1):
            path = "tile: it was called with more than x"
        report(self, path)
        if not torch.compiler.is_compiling() and self._model_name:  # equal blocks share one compilation
            note_layers(self)
        if self._run_split is not None:
            return self._run_split(*args, **kwargs)
        if path != "tiled_mlp":
            whole = MethodType(self._untiled.forward, self)  # tile knows the parameters of a forward's module
            return tile_where(whole, self._tiling, state_seen(self))(*args, **kwargs)
        family = known_of(self)  # type: ignore[arg-type]
        assert family is not None
        for name in family.projections:
            partitioned.gather_around(self, getattr(self, name)._parameters.values())  # type: ignore[arg-type]
        operands = family.operands(self)
        return tiled_mlp(
            args[0],
            operands.w_gate,
            operands.w_up,
            operands.w_down,
            biases=operands.biases,
            activation=activation_now(self, family),
            tiling=self._tiling,
            backend=self._backend,
        )


def activation_now(mlp: Any, known: Family | Found) -> Activation:
    """Return the activation between the projections, as `tiled_mlp` names it.

    Raises:
        UnsupportedError: it has none, which a layer whose weights are split cannot do without.
    """
    if isinstance(known, Found):
        found = known.activation
    else:
        found = activation_of(getattr(mlp, known.activation))
    if found is None:
        reason = None if isinstance(known, Found) else _reason_of_activation(mlp, known)
        raise UnsupportedError(error_text("tensor_parallel_mlp", "the MLP", "of its formula", reason or OTHER))
    return found


@cache
def tiled_class(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `untiled` whose forward is tiled."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(tiled_class)}
    return type(f"Tiled{untiled.__name__}", (Tiled, untiled), attributes)

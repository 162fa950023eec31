"""Layers that call the two linear layers of their MLP in their own forward: OPT's, BART's and its relatives'.

The layer's own code runs. What it does between the two is followed (`follow`); a probe of its code, with an attention that
returns its input, tells beforehand whether that leads from the one to the other.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs.config import Tiling
from tiled_torch.core.partitioned import is_partitioned
from tiled_torch.models.family import reason_called
from tiled_torch.models.mlps.chunk import GATHERED
from tiled_torch.models.mlps.follow import Between, PairRun, SwappedPart, is_activation, path_of_pair
from tiled_torch.models.mlps.layout import inline_pair, sizes_of
from tiled_torch.models.mlps.probe import same, tokens_of
from tiled_torch.models.mlps.stand_in import small_sizes, small_twin
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import note_layers, report

WIDER = 4  # times small_sizes: a norm of two columns hides what they were


class TiledInline(Remade):
    """A layer whose MLP is a part of its forward; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _ran: str | None = None
    _told: tuple[str, ...] = ()
    _model_name: str = ""
    _alone: bool = False


def _forward_of(untiled: type[nn.Module]) -> Callable[..., Any]:
    @wraps(untiled.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it cannot trace the stand-in
            _tell_of_compiling(untiled.__name__)
            return untiled.forward(self, *args, **kwargs)
        if self._model_name:
            note_layers(self)
        pair = inline_pair(self)
        reason = "its layers are not those that were probed" if pair is None else _reason_whole(self, pair)
        if pair is None or reason is not None:
            report(self, f"untiled: {reason}")
            return untiled.forward(self, *args, **kwargs)
        run = PairRun(self, pair, self._tiling, self._backend)
        with run.swapped():
            found = untiled.forward(self, *args, **kwargs)
        report(self, run.path)
        return found

    return forward


@torch.compiler.assume_constant_result
def _tell_of_compiling(name: str) -> bool:
    """Warn once for a graph: this runs while it is traced."""
    text = (
        f"tile_model: the MLP in {name} is not tiled: torch.compile traces its forward, which calls its layers itself."
    )
    warnings.warn(text, UserWarning, stacklevel=2)
    return True


def _reason_whole(layer: nn.Module, pair: tuple[str, str]) -> str | None:
    """Return why the layer's forward runs as it is; None where its MLP is followed."""
    parts = {name: child for name, child in layer.named_children() if name in pair or is_activation(child)}
    if any(isinstance(part, SwappedPart) for part in parts.values()):
        return "it was called inside itself"
    if any(is_partitioned(parameter) for part in parts.values() for parameter in part.parameters()):
        return GATHERED
    for name, part in parts.items():
        for inner_name, inner in part.named_modules(prefix=name):  # each hook runs once, as without tiling
            reason = reason_called(inner_name, inner)
            if reason is not None:
                return reason
    return None


def inline_path(layer: Any) -> str:
    """Return how the MLP of such a layer would run now."""
    pair = inline_pair(layer)
    assert pair is not None
    reason = _reason_whole(layer, pair)
    return planned(layer, pair, training=layer.training) if reason is None else f"untiled: {reason}"


def reason_not_inline(layer: nn.Module, pair: tuple[str, str]) -> str | None:
    """Return why the MLP in a layer's forward cannot be tiled; None where it can."""
    path = planned(layer, pair, training=False)
    return path.removeprefix("untiled: ") if path.startswith("untiled") else None


def planned(layer: nn.Module, pair: tuple[str, str], *, training: bool) -> str:
    """Return the path by which a layer's MLP would run, as a probe of its forward shows it."""
    calls = f"its forward calls {pair[0]} and {pair[1]} itself, among other layers"
    # Results of attention: with weights, with a cache too, or alone.
    runs = (_probe(layer, pair, training, results) for results in (2, 3, 1))
    found = [run for run in runs if isinstance(run, str) or run.way is not None or run.read is not None]
    known = next((run for run in found if isinstance(run, PairRun)), None)
    if known is None:
        return f"untiled: {calls}; {found[0]}" if found else f"untiled: {calls}"
    if known.path.startswith("untiled") or known.between is None:
        return known.path
    name = known.between.name
    call: Any = getattr(layer, name) if name in dict(layer.named_children()) else known.between.call
    up, down = (layer.get_submodule(part) for part in pair)
    return path_of_pair(pair, up, down, Between(name, call, known.between.known))


def _probe(layer: nn.Module, pair: tuple[str, str], training: bool, results: int) -> "PairRun | str":
    """The run of a small copy of a layer whose result was the same with and without its MLP tiled; or why there is none."""
    generator = torch.Generator().manual_seed(7)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            twin = _twin(layer, pair, results, generator)
            for inner in twin.modules():
                inner.training = training
            x = tokens_of(sizes_of(twin.get_submodule(pair[0])), generator)
            kind: Any = type(layer)._untiled if isinstance(layer, Remade) else type(layer)
            known = inspect.signature(kind.forward).parameters.values()
            needed = [p for p in known if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][2:]
            rest = dict.fromkeys(p.name for p in needed)
            torch.manual_seed(0)
            expected = kind.forward(twin, x.clone(), **rest)
            run = PairRun(twin, pair, Tiling(num_shards=2), "auto")
            torch.manual_seed(0)
            with run.swapped():
                found = kind.forward(twin, x.clone(), **rest)
    except Exception as error:  # of code that is not ours
        return f"a probe of its code ended in {type(error).__name__}"
    equal = zip(_tensors(found), _tensors(expected), strict=True)
    return run if all(same(a, b) for a, b in equal) else "a probe shows another result"


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def _twin(layer: nn.Module, pair: tuple[str, str], results: int, generator: torch.Generator) -> nn.Module:
    """A small copy of a layer; whatever has linear layers besides its MLP returns what it was given."""
    kind: Any = type(layer)._untiled if isinstance(layer, Remade) else type(layer)
    thin = kind.__new__(kind)
    vars(thin).update(vars(layer))
    children = {
        name: _Attention(results)
        if name not in pair and any(sizes_of(inner) is not None for inner in child.modules())
        else child
        for name, child in layer.named_children()
    }
    vars(thin)["_modules"] = children
    small = {size: WIDER * few for size, few in small_sizes(thin).items()}
    return small_twin(thin, small, generator)


class _Attention(nn.Module):
    """Stands for what mixes tokens: the first tensor that it was given, and as many results as asked for."""

    def __init__(self, results: int) -> None:
        super().__init__()
        self.results = [None] * (results - 1)  # no number, which a small twin would take for a size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return (x, *self.results) if self.results else x


@cache
def inline_class(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `untiled` whose MLP is tiled inside its own forward."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "forward": _forward_of(untiled)}
    attributes["_made_by"] = staticmethod(inline_class)
    # The same name: sharding policies find layers by it.
    return type(untiled.__name__, (TiledInline, untiled), attributes)

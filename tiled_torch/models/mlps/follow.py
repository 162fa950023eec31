"""An MLP whose layers a forward calls one by one: what its first layer made is followed to its last one, as it happens.

The first layer's result is a stand-in without values. Its activation is noted, and the last layer runs the MLP of what the
first was given. Any other operation gets the values, computed there on the graph as the untiled layer would have them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs.config import Activation, Tiling
from shared_specs.errors import UnsupportedError
from tiled_torch.core.autocast import after_autocast, autocast_dtype, without_autocast
from tiled_torch.mlp.api import tiled_mlp
from tiled_torch.models.family import activation_of, present_biases
from tiled_torch.models.mlps.found import reason_not_plain_operand, weight_and_bias
from tiled_torch.models.mlps.layout import sizes_of
from tiled_torch.tile.api import tile

NOT_HANDED_ON = "its forward does not hand what the one makes to the other"


@dataclass(frozen=True)
class Between:
    """Holds what comes between the two layers: an activation. name: its attribute. known: the specification's name of it."""

    name: str
    call: Callable[[Tensor], Tensor]
    known: Activation | None


@dataclass(frozen=True)
class PairCall:
    """One call of the first layer. version: of x, which must not change until the last layer runs."""

    run: "PairRun"
    x: Tensor
    cast: torch.dtype | None
    with_grad: bool
    version: int | None
    between: Between | None = None

    def stand_in(self) -> "Hidden":
        _, wide = sizes_of(self.run.up) or (0, 0)
        meta = torch.Size((*self.x.shape[:-1], wide)), after_autocast(self.x, self.cast), self.x.device
        found = Hidden(*meta)
        found.made_of = self
        return found

    def values(self) -> Tensor:
        """Return what the untiled layer has here, under the modes in which its first layer was called."""
        if self.version != _version(self.x):
            text = (
                "x was changed in place after its first layer was called. Call untile_model(model) for its own forward."
            )
            raise UnsupportedError(f"tile_model: {text}")
        cast = without_autocast(self.x) if self.cast is None else torch.autocast(self.x.device.type, dtype=self.cast)
        with self.run.as_before(), torch.set_grad_enabled(self.with_grad), cast:
            h = self.run.up(self.x)
            return h if self.between is None else self.between.call(h)


class Hidden(Tensor):
    """Stands for what lies between the two layers."""

    made_of: PairCall
    made: Tensor | None

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "Hidden":
        found = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)
        found.made = None
        return found

    def whole(self, operation: str) -> Tensor:
        if self.made is None:
            self.made = self.made_of.values()
            self.made_of.run.read = self.made_of.run.read or operation
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Hidden) and vars(first).get("made") is None:
            if func in _OUTSIDE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            found = FOLLOWED[func](*args, **kwargs) if func in FOLLOWED else NotImplemented
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", str(func))
        args, kwargs = pytree.tree_map_only(Hidden, lambda hidden: hidden.whole(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        text = f"{func} cannot read what a layer's MLP has between its layers. Call untile_model(model) for its own forward."
        raise UnsupportedError(f"tile_model: {text}")


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _activated(name: str, call: Any, known: Activation | None) -> Callable[[Hidden], Any]:
    """The stand-in after an activation, where there was none before."""

    def after(hidden: Hidden) -> Any:
        if hidden.made_of.between is not None:
            return NotImplemented
        return replace(hidden.made_of, between=Between(name, call, known)).stand_in()

    return after


def _relu(input: Any, inplace: bool = False) -> Any:
    return NotImplemented if inplace else _activated("relu", F.relu, "relu")(input)


def _silu(input: Any, inplace: bool = False) -> Any:
    return NotImplemented if inplace else _activated("silu", F.silu, "silu")(input)


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    def call(h: Tensor) -> Tensor:
        return F.gelu(h, approximate=approximate)

    return _activated("gelu", call, "gelu" if approximate == "none" else "gelu_tanh")(input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return input if 0 <= p <= 1 and (p == 0 or not training) else NotImplemented


# What asks for no value.
_OUTSIDE = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point,
})  # fmt: skip
FOLLOWED: dict[Any, Callable[..., Any]] = {
    F.relu: _relu, torch.relu: _relu, Tensor.relu: _relu, F.silu: _silu, F.gelu: _gelu,
    F.dropout: _dropout, torch.dropout: _dropout,
}  # fmt: skip


class PairRun:
    """One call of a layer's forward. way: how its MLP ran. read: the operation that asked for what is between its layers."""

    def __init__(self, layer: nn.Module, pair: tuple[str, str], tiling: Tiling, backend: str) -> None:
        self.pair, self.tiling, self.backend = pair, tiling, backend
        self.up, self.down = (layer.get_submodule(name) for name in pair)
        self.activations = {id(child): name for name, child in layer.named_children() if is_activation(child)}
        self.modules: list[Any] = [self.up, self.down]
        self.modules += [child for child in layer.children() if id(child) in self.activations]
        self.between: Between | None = None
        self.way: str | None = None
        self.read: str | None = None

    @property
    def path(self) -> str:
        if self.read is not None:
            return f"untiled: {self.read} reads what {self.pair[0]} makes"
        return self.way or f"untiled: {NOT_HANDED_ON}"

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of a layer or an activation inside the forward."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if module is self.up and isinstance(x, Tensor) and not isinstance(x, Hidden) and self._fits(x):
            return PairCall(self, x, autocast_dtype(x), torch.is_grad_enabled(), _version(x)).stand_in()
        if isinstance(x, Hidden) and x.made_of.run is self and x.made is None:
            made_of = x.made_of
            if id(module) in self.activations and made_of.between is None:
                between = Between(self.activations[id(module)], module, activation_of(module))
                return replace(made_of, between=between).stand_in()
            ready = made_of.between is not None and made_of.with_grad == torch.is_grad_enabled()
            if module is self.down and ready and made_of.version == _version(made_of.x):
                return self.mlp(made_of)
        name = type(module).__name__
        args, kwargs = pytree.tree_map_only(Hidden, lambda hidden: hidden.whole(name), (args, kwargs))
        with self.as_before():
            return module(*args, **kwargs)

    def _fits(self, x: Tensor) -> bool:
        """Whether the layer takes x, and its result has the dtype that its stand-in is going to have."""
        weight, (narrow, _) = next(self.up.parameters(), None), sizes_of(self.up) or (0, 0)
        if not x.is_floating_point() or x.dim() < 2 or x.shape[-1] != narrow:
            return False
        cast = autocast_dtype(x)
        if weight is None or not weight.is_floating_point():
            return True
        return after_autocast(x, cast) == after_autocast(weight, cast)

    def mlp(self, made_of: PairCall) -> Tensor:
        """The last layer's result, shard by shard."""
        between = self.between = made_of.between
        assert between is not None
        with self.as_before():
            self.way = path_of_pair(self.pair, self.up, self.down, between)
            if self.way != "tiled_mlp":
                return tile(Pair(self.up, between.call, self.down), tiling=self.tiling)(made_of.x)
            (w_up, b_up), (w_down, b_down) = weight_and_bias(self.up), weight_and_bias(self.down)
            biases = present_biases(up=b_up, down=b_down)
            options: dict[str, Any] = {"activation": between.known, "tiling": self.tiling, "backend": self.backend}
            return tiled_mlp(made_of.x, None, w_up, w_down, biases=biases, **options)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let every call of the layers inside come here first."""
        for module in self.modules:
            vars(module)["_inline_run"] = self
            module.__class__ = _swapped(type(module))
        try:
            yield
        finally:
            for module in self.modules:
                module.__class__ = type(module)._kind
                vars(module).pop("_inline_run", None)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the layers are themselves."""
        inside = [module for module in self.modules if vars(module).get("_inline_run") is self]
        for module in inside:
            module.__class__ = type(module)._kind
            del vars(module)["_inline_run"]
        try:
            yield
        finally:
            for module in inside:
                vars(module)["_inline_run"] = self
                module.__class__ = _swapped(type(module))


def path_of_pair(pair: tuple[str, str], up: nn.Module, down: nn.Module, between: Between) -> str:
    """Return how the MLP of two layers runs that were followed to each other."""
    linears = zip(pair, (up, down), strict=True)
    reason = next(filter(None, (reason_not_plain_operand(name, linear) for name, linear in linears)), None)
    if reason is None and between.known is None:
        reason = f"{between.name} is {type(between.call).__name__}"
    return "tiled_mlp" if reason is None else f"tile: {reason}"


class Pair(nn.Module):
    """The MLP as a module of its own, where the layers have to be called."""

    def __init__(self, up: nn.Module, activation: Callable[[Tensor], Tensor], down: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = up, activation, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


# Of torch.nn.modules.activation, what is not computed entry by entry, or draws.
_NOT_ENTRIES = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention, nn.RReLU)
_HOMES = ("transformers.activations", "torch.nn.modules.activation")


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is a function of each entry, without parameters."""
    plain = next(module.parameters(), None) is None and next(module.buffers(), None) is None
    return plain and type(module).__module__ in _HOMES and not isinstance(module, _NOT_ENTRIES)


class SwappedPart:
    """Marker of a layer inside the forward of the layer around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run: PairRun = vars(self)["_inline_run"]
        return run.call(self, args, kwargs)


@cache
def _swapped(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (SwappedPart, kind), {"__module__": kind.__module__, "_kind": kind})

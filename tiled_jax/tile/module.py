"""A tiled module as a module: of a subclass, with the same attributes, so that state, filters and checkpoints stay the same."""

import functools
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

from flax import nnx

from shared_specs.config import Tiling
from shared_specs.errors import fail
from tiled_jax.tile.call import call_tiled

_MADE = "Tiled:"


def tiled_nnx(module: nnx.Module, options: Tiling, rngs: Any) -> nnx.Module:
    """Return a module that holds what `module` holds and computes it shard by shard; rngs, where given, become a part of it."""
    return nnx_class(type(module))(module, options, rngs)


@functools.cache
def nnx_class(kind: type) -> Any:
    """Return the class of a tiled nnx module, the same one for the same class."""

    def __init__(self: Any, module: Any, options: Tiling, rngs: Any) -> None:
        # All but the trace that it was made in, since a copy may be made in a later one.
        vars(self).update({name: value for name, value in vars(module).items() if name != "_pytree__state"})
        self.tile_options = options
        if rngs is not None:
            self.tile_rngs = rngs

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = types.MethodType(kind.__call__, self)
        return call_tiled(whole, self.tile_options, getattr(self, "tile_rngs", None), args, kwargs)

    return _subclass(kind, {"__init__": __init__, "__call__": __call__}, pytree=kind._pytree__is_pytree)  # type: ignore[attr-defined]


def is_unbound_linen(value: Any) -> bool:
    """Return whether value is a linen module outside of any `init`, `apply` or `bind`."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(value, linen.Module) and value.scope is None


def tiled_linen(module: Any, options: Tiling, rngs: Any) -> Any:
    """Return a linen module with the fields of `module` that computes it shard by shard.

    Raises:
        SpecError: rngs are given.
    """
    if rngs is not None:
        advice = "Every shard draws from splits of the module's own streams; give them to init or apply."
        fail("tile", "rngs", "None for a linen module", type(rngs).__name__, advice=advice)
    names = [name for name, field in module.__dataclass_fields__.items() if field.init and name != "tile_options"]
    return linen_class(type(module))(**{name: getattr(module, name) for name in names}, tile_options=options)


@functools.cache
def linen_class(kind: type) -> Any:
    """Return the class of a tiled linen module, which has one field more: how it is tiled."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_tiled(types.MethodType(kind.__call__, self), self.tile_options, None, args, kwargs)

    own = {"__call__": __call__, "__annotations__": {"tile_options": Tiling}, "tile_options": Tiling()}
    return _subclass(kind, own)


def _subclass(kind: type, own: Mapping[str, Any], **options: Any) -> Any:
    """Return a subclass that pickles find again, in this module, by a name that says which class it is made of."""
    name = f"{_MADE}{kind.__module__}:{kind.__qualname__}".replace(".", "/")
    body = {**own, "__module__": __name__, "__qualname__": name, "__doc__": kind.__doc__}
    return types.new_class(kind.__name__, (kind,), options, lambda namespace: namespace.update(body))


def __getattr__(name: str) -> Any:
    if not name.startswith(_MADE):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, qualname = name.removeprefix(_MADE).replace("/", ".").rsplit(":", 1)
    kind = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return nnx_class(kind) if issubclass(kind, nnx.Module) else linen_class(kind)  # type: ignore[arg-type]

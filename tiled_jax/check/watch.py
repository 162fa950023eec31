"""What the modules of a model return in a step, told from inside a compiled program."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.check.trained import Value

_16_BITS = ("bfloat16", "float16")


def as_value(array: Any) -> Value:
    """Return an array in NumPy, of 16 bits as float32."""
    dtype = str(jnp.result_type(array))
    return Value(np.asarray(array, np.float32 if dtype in _16_BITS else None), dtype)


def plain_name(path: Iterable[Any]) -> str:
    """Return the name of a module or a variable: its path with dots."""
    return ".".join(map(str, path))


class Observer:
    """Keeps the first result of each module in a step, and its first argument.

    A module is called as ever, by a class of its own that tells what came out. Only what is called itself is watched: nothing
    inside of a tiled part.
    """

    def __init__(self) -> None:
        self.forward: dict[str, Value] = {}
        self.given: dict[str, Value] = {}

    def clear(self) -> None:
        self.forward.clear()
        self.given.clear()

    def follow(self, model: nnx.Module, paths: Mapping[str, str]) -> None:
        """Watch the modules of a model. paths: `tiling_paths` of it; a block's function is that of one class alone."""
        inside = tuple(f"{name}." for name in paths if name)
        left_out = {"", *(name for name, path in paths.items() if path == "tiled_block")}
        for path, module in list(nnx.iter_modules(model)) if "" not in paths else ():
            name = plain_name(path)
            if name not in left_out and not name.startswith(inside) and "__call__" in dir(type(module)):
                object.__setattr__(module, "__class__", _watched(type(module), Told(self, name)))

    def _keep(self, name: str, x: Any, y: Any) -> None:
        if name not in self.forward:
            self.forward[name] = as_value(y)
            if x is not None:
                self.given[name] = as_value(x)


class Told:
    """Whom a module tells what it returned."""

    def __init__(self, watch: Observer, name: str) -> None:
        self.watch, self.name = watch, name

    def __call__(self, x: Any, y: Any) -> None:
        if isinstance(y, jax.Array):
            keep: Callable[..., None] = partial(self.watch._keep, self.name)
            jax.debug.callback(keep, x if isinstance(x, jax.Array) else None, y)


def _watched(kind: type, told: Told) -> type:
    def call(module: Any, *given: Any, **named: Any) -> Any:
        result = kind.__call__(module, *given, **named)
        told(given[0] if given else None, result[0] if isinstance(result, tuple) and result else result)
        return result

    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

"""The form of a module: all that decides what it computes besides the values of its variables."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tiled_jax.core.activation_functions import recognised

Path = tuple[Any, ...]
Form = dict[str, Any]

# Written by `train` and `eval`; a probe looks at a module in both modes.
_MODES = ("deterministic", "use_running_average")


class PlainValue:
    """A value that is part of a module and no array; two are equal where they are one, say so, or are one activation."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlainValue):
            return False
        if self.value is other.value:
            return True
        try:
            if bool(self.value == other.value):
                return True
        except Exception:  # whatever a comparison of somebody else's objects raises
            return False
        return _same_activation(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return getattr(self.value, "__name__", repr(self.value))


def _same_activation(a: Any, b: Any) -> bool:
    """Return whether two functions compute one known activation: a copy of jax.nn.silu, of a partial, is another object."""
    if isinstance(a, type) or isinstance(b, type) or not (callable(a) and callable(b)):
        return False
    return recognised(a) is not None and recognised(a) == recognised(b)


def mlp_form_of(module: nnx.Module, kind: type) -> Form:
    """Return attributes by their paths -> classes of modules and variables, and values of all else. kind: in place of the
    class of the module itself."""
    return {"": kind} | dict(_entries(module, "", {id(module)}))


def _entries(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    items = (
        node.items()
        if isinstance(node, Mapping)
        else vars(node).items()
        if hasattr(node, "__dict__")
        else enumerate(node)
    )
    for name, value in items:
        if str(name).startswith("_pytree__") or name in _MODES:
            continue
        yield from _entry(value, f"{path}.{name}".removeprefix("."), seen)


def _entry(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nnx.Variable):
        yield path, type(value)
    elif isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        yield path, jax.Array
    elif isinstance(value, nnx.Pytree) or (isinstance(value, dict | list | tuple) and _holds_arrays(value)):
        yield path, type(value)
        if id(value) not in seen:
            yield from _entries(value, path, seen | {id(value)})
    else:
        yield path, PlainValue(value)


def _holds_arrays(value: Any) -> bool:
    kinds = (nnx.Pytree, nnx.Variable, jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    leaves = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def difference(found: Form, expected: Form) -> str | None:
    """Return in words the first attribute in which a module is not what it was; None where there is none."""
    for path in sorted(found.keys() | expected.keys(), key=lambda path: (path.count("."), path)):
        if path not in found:
            return f"it has no {path} any more"
        if path not in expected:
            return f"it has {path} besides"
        now, before = found[path], expected[path]
        if type(now) is not type(before) or now != before:
            return f"{path or 'it'} is {getattr(now, '__name__', now)}"
    return None


def leaves_of(module: nnx.Module) -> dict[Path, Any]:
    """Return the arrays of a module, in their variables where they have one, by their paths."""
    return dict(nnx.to_flat_state(nnx.split(module)[1]))


def value_of(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf

"""A function, and apart from it the arrays that it closes over, so that a `shard_map` can hand it others in their place.

On Explicit mesh axes a type says how an array is cut, and holds outside a `shard_map` only: what fn reads besides its arguments
has to become operands too. It is looked for where a function keeps it: in cells, globals, defaults and the arguments of a
`partial`, in pytrees and Flax modules there, and in functions there likewise.
"""

import dis
import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any

import jax
from flax import nnx

from tiled_jax.tile.token_layout import is_graph

Made = Callable[[Iterator[jax.Array], Iterator[Any]], Any]  # a value from the arrays and modules that are in it now


class Closure:
    """The arrays and modules that a function closes over.

    arrays, modules: what it reads, in a fixed order. Other objects that hold arrays are not looked into.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.arrays: list[jax.Array] = []
        self.modules: list[Any] = []
        self._opened: list[FunctionType] = []
        self._made_anew: dict[int, FunctionType] = {}
        self._made = self._open(fn) or (lambda arrays, modules: fn)

    def over(self, arrays: Iterator[jax.Array], modules: Iterator[Any]) -> Callable[..., Any]:
        """Return the function with others in the place of `arrays` and `modules`."""
        self._made_anew.clear()
        return self._made(arrays, modules)

    def _open(self, value: Any) -> Made | None:
        """Return how to make `value` anew; None where there is nothing in it."""
        if isinstance(value, jax.Array):
            self.arrays.append(value)
            return lambda arrays, modules: next(arrays)
        if is_graph(value):
            self.modules.append(value)
            return lambda arrays, modules: next(modules)
        if isinstance(value, FunctionType):
            if any(value is seen for seen in self._opened):  # in two places, or in itself
                return lambda arrays, modules: self._made_anew.get(id(value), value)
            self._opened.append(value)
            return self._open_function(value)
        if isinstance(value, MethodType):
            return self._open_all([value.__self__], lambda new: MethodType(value.__func__, new[0]))
        if isinstance(value, functools.partial):
            return self._open_all(
                [value.func, value.args, value.keywords], lambda new: functools.partial(new[0], *new[1], **new[2])
            )
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_graph)
        if jax.tree_util.treedef_is_leaf(treedef) and leaves and leaves[0] is value:
            return None
        return self._open_all(leaves, treedef.unflatten)

    def _open_all(self, values: list[Any], build: Callable[[list[Any]], Any]) -> Made | None:
        found = [self._open(value) for value in values]
        if not any(found):
            return None

        def made(arrays: Iterator[jax.Array], modules: Iterator[Any]) -> Any:
            pairs = zip(values, found, strict=True)
            return build([value if inner is None else inner(arrays, modules) for value, inner in pairs])

        return made

    def _open_function(self, fn: FunctionType) -> Made | None:
        cells, names = _cells(fn), _globals(fn)
        of_cells = {i: self._open(value) for i, value in cells.items()}
        of_globals = {name: self._open(value) for name, value in names.items()}
        of_defaults, of_keywords = self._open(fn.__defaults__), self._open(fn.__kwdefaults__)
        if not any((*of_cells.values(), *of_globals.values(), of_defaults, of_keywords)):
            return None

        def made(arrays: Iterator[jax.Array], modules: Iterator[Any]) -> FunctionType:
            closure = tuple(CellType() if of_cells.get(i) else cell for i, cell in enumerate(fn.__closure__ or ()))
            scope = dict(fn.__globals__) if any(of_globals.values()) else fn.__globals__
            found = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, closure or None)
            found.__kwdefaults__ = fn.__kwdefaults__
            self._made_anew[id(fn)] = found  # before its cells are filled: one of them may hold it
            for i, inner in of_cells.items():
                if inner:
                    closure[i].cell_contents = inner(arrays, modules)
            for name, inner in of_globals.items():
                if inner:
                    scope[name] = inner(arrays, modules)
            if of_defaults:
                found.__defaults__ = of_defaults(arrays, modules)
            if of_keywords:
                found.__kwdefaults__ = of_keywords(arrays, modules)
            return found

        return made


def _cells(fn: FunctionType) -> dict[int, Any]:
    """Return the contents of a function's cells by number, but for names that are not bound yet."""
    found = {}
    for i, cell in enumerate(fn.__closure__ or ()):
        with suppress(ValueError):
            found[i] = cell.cell_contents
    return found


def _globals(fn: FunctionType) -> dict[str, Any]:
    """Return the arrays, pytrees and modules that a function reads by a global name; functions of a module are not its own."""
    named = [step.argval for step in dis.get_instructions(fn.__code__) if step.opname == "LOAD_GLOBAL"]
    found = {name: fn.__globals__[name] for name in named if name in fn.__globals__}
    held = (jax.Array, nnx.Pytree, nnx.Variable, dict, list, tuple)
    return {name: value for name, value in found.items() if isinstance(value, held)}

"""Which arguments and results of a token-wise function have one row per token, and how a shard of them looks.

No loops and no differentiation here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.tile.token_layout import Form, TokenLayout, first_name, has_rows, leading_dims
from tiled_jax.core.arrays import check_known_shape, differing_devices
from tiled_jax.core.loops import vary_over


@dataclass(frozen=True)
class Layout(TokenLayout):
    """The flattened arguments of one call.

    Args:
        leaves: arrays, modules and everything else, in order. rowed: per leaf, whether it is cut.
        lead, function: as in `TokenLayout`.
    """

    leaves: tuple[Any, ...]
    rowed: tuple[bool, ...]
    treedef: Any
    lead: tuple[int, ...]
    function: str = "tile"

    def cut(self) -> list[jax.Array]:
        """Return every leaf that is cut, as it is."""
        return [leaf for leaf, rowed in zip(self.leaves, self.rowed, strict=True) if rowed]

    def whole(self) -> list[jax.Array]:
        """Return every array that is passed whole."""
        pairs = zip(self.leaves, self.rowed, strict=True)
        return [leaf for leaf, rowed in pairs if not rowed and isinstance(leaf, jax.Array)]

    def rows(self) -> list[jax.Array]:
        """Return every leaf that is cut, as [T, ...]."""
        return [a.reshape(self.flat_shape(a.shape)) for a in self.cut()]

    def modules(self) -> list[Any]:
        """Return every leaf that is a module or another graph of variables."""
        return [leaf for leaf in self.leaves if is_graph(leaf)]

    def varying_over(self, axes: Iterable[str]) -> "Layout":
        """Return the same, arrays that are passed whole with the type of something that varies along mesh axes."""
        pairs = zip(self.leaves, self.rowed, strict=True)
        return replace(self, leaves=tuple(leaf if rowed else varied(leaf, axes) for leaf, rowed in pairs))

    def with_whole(self, arrays: Iterator[jax.Array]) -> "Layout":
        """Return the same with others in the place of the arrays that are passed whole."""
        pairs = zip(self.leaves, self.rowed, strict=True)
        leaves = (next(arrays) if isinstance(leaf, jax.Array) and not rowed else leaf for leaf, rowed in pairs)
        return replace(self, leaves=tuple(leaves))

    def arguments(self, pieces: Sequence[jax.Array], modules: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for one shard: its rows [t, ...] and the modules as they are inside."""
        cut, inside = iter(pieces), iter(modules)
        leaves = []
        for leaf, rowed in zip(self.leaves, self.rowed, strict=True):
            if rowed:
                piece = next(cut)
                leaves.append(piece[None] if self.batched else piece)
            else:
                leaves.append(next(inside) if is_graph(leaf) else leaf)
        return jax.tree.unflatten(self.treedef, leaves)


def varied(value: Any, axes: Iterable[str]) -> Any:
    """Return a floating array with the type of something that varies along the axes too; anything else as it is."""
    floating = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    return vary_over(value, axes) if floating else value


def is_graph(leaf: Any) -> bool:
    """Return whether flax keeps variables in it that fn may read or write: a module, `nnx.Rngs`, one variable."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def split(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, function: str = "tile"
) -> Layout:
    """Return the layout of a call; SpecError or TypeError where x cannot be cut.

    Beside x [T, H] `tile` cuts nothing else: an array [T, ...] may as well be a weight, when T happens to be its size.
    """
    x = args[0] if args else kwargs.get(first_name(fn))
    if not isinstance(x, jax.Array | np.ndarray):
        fail_type(function, "x, the first argument,", "an array", type(x).__name__)
    lead = leading_dims(function, tuple(x.shape))
    check_known_shape(function, "x", x)
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)), is_leaf=is_graph)
    alone = function == "tile" and len(lead) == 1
    rowed = tuple(
        leaf is x or (not alone and isinstance(leaf, jax.Array | np.ndarray) and has_rows(tuple(leaf.shape), lead))
        for leaf in leaves
    )
    arrays = tuple(jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves)
    if isinstance(x, jax.Array):
        _check_devices(function, x, [leaf for leaf, has_rows in zip(arrays, rowed, strict=True) if has_rows])
    return Layout(arrays, rowed, treedef, lead, function)


def _check_devices(function: str, x: jax.Array, cut: Sequence[jax.Array]) -> None:
    """Raise SpecError where what is cut as x is lies elsewhere: one loop takes them all. What is passed whole is up to fn."""
    of_x, *devices = differing_devices([x, *cut])
    for array, device in zip(cut, devices, strict=True):
        if of_x and device not in ("", of_x):
            rule, shapes = f"on x's device {of_x}", f"its shape is {show_shape(tuple(array.shape))}"
            fail(function, "every array with x's leading dims", rule, device, shapes=shapes)


def form_of(index: int, result: Any, t: int, layout: Layout) -> Form:
    """Return the form of fn's result number `index` for a shard of t tokens."""
    if not isinstance(result, jax.Array | np.ndarray):
        fail_type(layout.function, f"output {index} of fn", "an array or None", type(result).__name__)
    return layout.form(index, tuple(result.shape), t)

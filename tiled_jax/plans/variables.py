"""What a model holds: parameters, of them those that are trained, and beside them random keys, their counts, statistics.

The last are carried through a step as devices have them.
"""

from typing import Any

import jax
from flax import nnx
from jax import lax

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from tiled_jax.core.loops import varying
from tiled_jax.core.products import wide

HERE = "parallelize"


def is_state(_: Any, leaf: Any) -> bool:
    """Return whether a variable is of one of Flax's types for what a call itself changes."""
    return isinstance(leaf, nnx.RngState | nnx.BatchStat | nnx.Cache | nnx.Intermediate)


def split_model(model: nnx.Module, held: Any) -> tuple[Any, nnx.State, nnx.State]:
    """Return the graph, the parameters, which are the variables that the filter `held` takes, and all others of a model."""
    graph, parameters, others = nnx.split(model, held, ...)
    return graph, parameters, others


def trained_paths(parameters: nnx.State, wrt: Any) -> frozenset[tuple[Any, ...]]:
    """Return the paths of the parameters that the filter `wrt` takes.

    Raises:
        TypeError: wrt is no filter of nnx. SpecError: it takes none, though it is not the default, or one without a derivative.
    """
    taken = {path: leaf for path, leaf in nnx.to_flat_state(parameters) if filter_of(wrt)(path, leaf)}
    if not taken and wrt is not nnx.Param:
        fail(HERE, "wrt", "a filter that takes a parameter of the model", f"{wrt!r}, which takes none")
    for path, leaf in taken.items():
        dtype = leaf.get_value().dtype
        if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            name = ".".join(map(str, path))
            fail(HERE, "wrt", "a filter of floating-point parameters", f"one that takes {name}, of {dtype}")
    return frozenset(taken)


def filter_of(wrt: Any) -> Any:
    """Return the predicate (path, variable) -> bool of a filter of nnx; TypeError where it is none."""
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError):  # the second from the message of the first
        fail_type(
            HERE, "wrt", "a filter of nnx: a type of variable, a predicate, nnx.Any(...), ...", type(wrt).__name__
        )


def parted(parameters: nnx.State, paths: frozenset[tuple[Any, ...]]) -> tuple[nnx.State, nnx.State]:
    """Return the parameters at these paths, and the others."""
    flat = nnx.to_flat_state(parameters)
    taken = [(path, leaf) for path, leaf in flat if path in paths]
    return nnx.from_flat_state(taken), nnx.from_flat_state([(path, leaf) for path, leaf in flat if path not in paths])


def joined(*states: nnx.State) -> nnx.State:
    """Return what `parted` was given."""
    return nnx.from_flat_state([pair for state in states for pair in nnx.to_flat_state(state)])


def of_rank(variables: nnx.State, axes: tuple[str, ...]) -> nnx.State:
    """Return the variables as one data rank computes with them: every random key folded with its number along `axes`.

    What ranks draw differs because their sequences do.
    """
    if not axes:
        return variables
    rank = lax.axis_index(axes)

    def folded(keys: jax.Array) -> jax.Array:
        flat = jax.vmap(lambda key: jax.random.fold_in(key, rank))(keys.reshape(-1))
        return flat.reshape(keys.shape)

    return jax.tree.map(lambda a: folded(a) if is_key(a) else a, variables)


def same_keys(before: nnx.State, after: nnx.State) -> nnx.State:
    """`after`, once it holds the same variables and, of them, the same random keys as `before`."""
    old, new = jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after)
    if [path for path, _ in old] != [path for path, _ in new]:
        names = {jax.tree_util.keystr(path) for path, _ in old} ^ {jax.tree_util.keystr(path) for path, _ in new}
        advice = "Return what a call records, and pop it from the model (nnx.pop), inside loss_fn."
        _unsupported("the same after a call as before", ", ".join(sorted(names)), advice)
    for (path, a), (_, b) in zip(old, new, strict=True):
        if is_key(a) and a is not b:
            advice = "Draw from nnx.Rngs, which counts its draws and keeps its key."
            _unsupported("without random keys that a call replaces", jax.tree_util.keystr(path), advice)
    return after


def agree_on_state(given: nnx.State, after: nnx.State) -> nnx.State:
    """Return the state that all devices go on with: floating-point statistics averaged, keys as `given`, before they were
    folded.
    """

    def one(path: Any, a: Any, b: Any) -> Any:
        if is_key(a):
            return a
        over = tuple(sorted(varying(b)))
        if not over:
            return b
        if not jax.numpy.issubdtype(b.dtype, jax.numpy.floating):
            advice = "Only floating-point statistics are averaged. Compute it from what all devices have."
            _unsupported(f"the same on all devices, or floating-point ({b.dtype})", jax.tree_util.keystr(path), advice)
        return lax.pmean(b.astype(wide(b.dtype)), over).astype(b.dtype)

    return jax.tree.map_with_path(one, given, after)


def is_key(a: Any) -> bool:
    """Return whether an array is of typed random keys."""
    return jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key)


def _unsupported(rule: str, got: str, advice: str) -> None:
    raise UnsupportedError(error_text(HERE, "the model's variables", rule, got, advice=advice))

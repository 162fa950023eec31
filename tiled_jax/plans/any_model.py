"""The loss of any nnx model inside `shard_map`: modules in lists gather their own parameters, the rest is gathered first."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from shared_specs.errors import UnsupportedError, error_text
from tiled_jax.models.others.tiled import is_tiled
from tiled_jax.plans.data import Mapped
from tiled_jax.plans.registry import Path
from tiled_jax.plans.variables import is_key, same_keys, split_model

HERE = "parallelize"


def generic_loss(
    graph: Any,
    parameters: nnx.State,
    variables: nnx.State,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    mapped: Mapped,
) -> tuple[Any, Any, nnx.State]:
    """Return (sum, count) of loss_fn over this device's share of the batch, and the other variables after it.

    A mean counts as one of as many sequences.
    """
    flat = nnx.to_flat_state(parameters)
    unit_of = _units(nnx.merge(graph, parameters, variables, copy=True), [path for path, _ in flat])
    outside = [(path, leaf) for path, leaf in flat if path not in unit_of]
    inside = {path: leaf for path, leaf in flat if path in unit_of}
    gathered = nnx.to_flat_state(mapped.gather(nnx.from_flat_state(outside))) if outside else []
    shown = [(path, leaf.replace(_shown(path, leaf.get_raw_value(), mapped))) for path, leaf in inside.items()]
    model = nnx.merge(graph, nnx.from_flat_state([*gathered, *shown]), variables, copy=True)
    for unit in sorted(set(unit_of.values()), key=str):
        own = [(path[len(unit) :], leaf) for path, leaf in inside.items() if unit_of[path] == unit]
        _gathers_itself(_at(model, unit), nnx.from_flat_state(own), unit, mapped)
    loss = loss_fn(model, mapped.cast(batch))
    total, count = loss if isinstance(loss, tuple) else (loss, 1)
    return total, count, same_keys(variables, split_model(model, mapped.held)[2])


def _units(model: nnx.Module, parameters: list[Path]) -> dict[Path, Path]:
    """Return the paths of parameters -> those of the modules that gather them; a parameter in no list has none.

    That is the module in a list, tuple or dict of ints, or the tiled one that has the list, which reads them in one call.
    """
    tiled = {path for path, module in nnx.iter_modules(model) if is_tiled(module)}
    found: dict[Path, Path] = {}
    for path in parameters:
        place = next((place for place, key in enumerate(path[:-1]) if isinstance(key, int)), None)
        if place is not None:
            above = (path[:length] for length in range(place + 1) if path[:length] in tiled)
            found[path] = next(above, path[: place + 1])
    return found


def _at(model: Any, path: Path) -> Any:
    for key in path:
        model = model[key] if isinstance(key, int) else getattr(model, key)
    return model


def _shown(path: Path, part: jax.Array, mapped: Mapped) -> Any:
    """Return what the model has for a parameter of a module in a list; its part would pass for the whole."""
    split = bool(mapped.axes.shard) and mapped.placements[path].shard_dim is not None
    return SplitParameter(path, part) if split else part


def _gathers_itself(module: nnx.Module, parameters: nnx.State, prefix: Path, mapped: Mapped) -> None:
    """Make the module call itself with its parameters gathered, for as long as the call lasts."""
    kind = type(module)
    own = {path for path, _ in nnx.to_flat_state(parameters)}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, held, variables = split_model(self, mapped.held)
        shared = nnx.from_flat_state([(path, leaf) for path, leaf in nnx.to_flat_state(held) if path not in own])
        _check_whole(shared)
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def run(parameters: nnx.State, *arrays: Any) -> Any:
            *arrays, shared, variables = arrays  # type: ignore[assignment]
            inner = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                inner[place] = array
            given, named = jax.tree.unflatten(tree, inner)
            module = nnx.merge(graph, parameters, shared, variables, copy=True)
            y = kind.__call__(module, *given, **named)  # type: ignore[operator]
            return y, same_keys(variables, split_model(module, mapped.held)[2])

        layer = mapped.layer(run, prefix, index=next((key for key in prefix[-1:] if isinstance(key, int)), 0))
        y, after = layer(parameters, *(leaves[place] for place in places), shared, variables)
        nnx.update(self, jax.tree.map(lambda before, after: before if is_key(before) else after, variables, after))
        return y

    # The instance keeps its class's name and everything else that its owner may look at.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _check_whole(parameters: nnx.State) -> None:
    """Those that a module in a list shares with others are gathered already, unless those others are in lists as well."""
    for _, leaf in nnx.to_flat_state(parameters):
        if isinstance(leaf.get_raw_value(), SplitParameter):
            leaf.get_raw_value().refuse()


class SplitParameter:
    """Stands for a parameter of which this device has a part, wherever but in the call of its own module.

    A part that is read as if it were the whole, by a penalty on the weights, say, would be wrong without a word.
    """

    def __init__(self, path: Path, part: jax.Array) -> None:
        self.path, self.dtype = ".".join(map(str, path)), part.dtype

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse the use of a parameter outside the call of its own module.

        Raises:
            UnsupportedError: always.
        """
        rule = "read in the call of its own module alone, where it is gathered"
        advice = "Put what loss_fn needs of it into the module's result, or register rules with a loss."
        raise UnsupportedError(error_text(HERE, self.path, rule, "a use elsewhere", advice=advice))

    __getitem__ = __iter__ = __len__ = __float__ = __neg__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __truediv__ = refuse
    __matmul__ = __rmatmul__ = __abs__ = refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by protocols
            raise AttributeError(name)
        self.refuse()

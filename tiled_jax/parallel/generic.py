"""The loss of any nnx model inside `shard_map`: modules in lists gather their own parameters, the rest is gathered first."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tiled_jax.parallel.mapped import Mapped
from tiled_jax.parallel.rules import Path


def generic_loss(
    graph: Any, parameters: nnx.State, batch: Any, loss_fn: Callable[[Any, Any], Any], mapped: Mapped
) -> tuple[Any, Any]:
    """(sum, count) of loss_fn over this device's share of the batch; a mean counts as one of as many sequences."""
    flat = nnx.to_flat_state(parameters)
    units = {unit for path, _ in flat if (unit := unit_of(path)) is not None}
    outside = [(path, leaf) for path, leaf in flat if unit_of(path) is None]
    inside = [(path, leaf) for path, leaf in flat if unit_of(path) is not None]
    gathered = nnx.to_flat_state(mapped.gather(nnx.from_flat_state(outside))) if outside else []
    model = nnx.merge(graph, nnx.from_flat_state([*gathered, *inside]))
    for unit in sorted(units, key=str):
        _gathers_itself(_at(model, unit), unit, mapped)
    loss = loss_fn(model, mapped.cast(batch))
    return loss if isinstance(loss, tuple) else (loss, 1)


def unit_of(path: Path) -> Path | None:
    """The path of the module in a list, tuple or dict of ints that a parameter belongs to; None for one in no list."""
    index = next((place for place, key in enumerate(path) if isinstance(key, int)), None)
    return None if index is None or index == len(path) - 1 else path[: index + 1]


def _at(model: Any, path: Path) -> Any:
    for key in path:
        model = model[key] if isinstance(key, int) else getattr(model, key)
    return model


def _gathers_itself(module: nnx.Module, prefix: Path, mapped: Mapped) -> None:
    """Make the module call itself with its parameters gathered, for as long as the call lasts."""
    kind = type(module)
    graph, parameters = nnx.split(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def run(parameters: nnx.State, *arrays: jax.Array) -> Any:
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            given, named = jax.tree.unflatten(tree, leaves)
            return kind.__call__(nnx.merge(graph, parameters), *given, **named)  # type: ignore[operator]

        return mapped.layer(run, prefix, index=prefix[-1])(parameters, *(leaves[place] for place in places))

    # The instance keeps its class's name and everything else that its owner may look at.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

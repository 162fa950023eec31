"""The parameters of an nnx model, and which of them are trained."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from shared_specs.errors import fail_type


def trained_filter(model: nnx.Module, wrt: Any) -> Any:
    """Return the filter of the trained parameters: None is the adapters where there are any, else all."""
    if wrt is not None:
        return wrt
    held = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.LoRAParam if any(isinstance(leaf, nnx.LoRAParam) for _, leaf in held) else nnx.Param


def with_trained(function: str, model: nnx.Module, wrt: Any) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yield the path of every parameter, its value, or that one's shape, and whether it is trained.

    Raises:
        TypeError: wrt is no filter.
    """
    try:
        takes = nnx.filterlib.to_predicate(trained_filter(model, wrt))
    except (TypeError, ValueError):  # as in `parallelize`
        fail_type(function, "wrt", "a filter of nnx or None", type(wrt).__name__)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield path, leaf.get_value(), bool(takes(path, leaf))

"""Flax linen modules inside a loop over shards: their variables read as they are, random streams split, writes refused.

A linen module keeps variables and random streams in the scope of the call it is part of, which a shard, another trace, must
not touch: the same stream would give every shard the same numbers, and what is made inside would leak.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from shared_specs.errors import UnsupportedError, fail, refusal_text
from tiled_jax.tile import module_state, token_layout


def is_bound(value: Any) -> bool:
    """Return whether value is a linen module that is part of a running `init` or `apply`, or of a `bind`."""
    linen = sys.modules.get("flax.linen")  # nobody made a linen module where it was never imported
    return linen is not None and isinstance(value, linen.Module) and value.scope is not None


def owner_of(fn: Callable[..., Any]) -> Any:
    """Return the bound linen module that fn is, or is a method of; None for every other function."""
    owner = getattr(fn, "__self__", None) if inspect.ismethod(fn) else fn
    return owner if is_bound(owner) else None


def lifted(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rngs: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a pure function in place of a bound linen module or its method, and the keyword arguments to call it with.

    Its random streams come as `nnx.Rngs`, which a loop over shards splits. Where the module is being initialised, its
    variables are made by one token first. Any other function, and its arguments, are returned as they are.

    Raises:
        SpecError: rngs are given besides the module's own streams.
        UnsupportedError: fn writes a variable, or holds a module whose variables are another module's.
    """
    module = owner_of(fn)
    if module is None:
        return fn, kwargs
    _check_own(module)
    if rngs is not None or "rngs" in kwargs:
        advice = "Every shard draws from splits of the module's own streams; give them to init or apply."
        fail("tile", "rngs", "None for a linen module", type(rngs).__name__, advice=advice)
    if module.is_initializing():
        layout = token_layout.split(fn, args, kwargs)
        first_args, first_kwargs = layout.arguments([a[:1] for a in layout.rows()], layout.modules())
        fn(*first_args, **first_kwargs)
    variables, mutable = module.variables, module.scope.mutable
    clone, method = module.clone(parent=None), getattr(fn, "__func__", None)

    def pure(*args: Any, rngs: nnx.Rngs, **kwargs: Any) -> Any:
        keys = {name: rngs[name]() for name in names}
        writable = False if module.is_initializing() else mutable
        out = clone.apply(variables, *args, rngs=keys, mutable=writable, method=method, **kwargs)
        if writable is False:
            return out
        result, after = out
        _check_unwritten(variables, after)
        return result

    names = list(module.scope.rngs)
    return pure, {**kwargs, "rngs": nnx.Rngs(**{name: module.make_rng(name) for name in names})}


def _check_own(module: Any) -> None:
    """Refuse modules handed to `module`'s constructor inside nn.compact: their variables are those of the one around."""
    linen: Any = sys.modules["flax.linen"]
    fields = [
        getattr(module, field.name) for field in dataclasses.fields(module) if field.name not in ("parent", "name")
    ]
    for held in jax.tree.leaves(fields, is_leaf=lambda value: isinstance(value, linen.Module)):
        if is_bound(held) and held.parent is not module:
            wrong = f"fn holds {held.name}, a module of {type(held.parent).__name__}"
            advice = "Make both in setup, or tile a module that makes its own inside nn.compact."
            raise UnsupportedError(refusal_text("tile", wrong, advice=advice))


def _check_unwritten(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    known = dict(jax.tree_util.tree_leaves_with_path(dict(before)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(after)):
        if known.get(path) is not leaf:
            names = ".".join(str(getattr(key, "key", key)) for key in path)
            advice = (
                "Each shard would see the state of another; write it outside of fn, or switch it off "
                "(for statistics: use_running_average=True)."
            )
            wrong = f"fn writes to the state of its modules: {names}"
            raise UnsupportedError(refusal_text("tile", wrong, advice=advice))


@contextmanager
def refusing_bound_modules(function: str, outside: Any) -> Iterator[None]:
    """Refuse, while fn runs for a shard, a call of a linen module that was bound outside of it: UnsupportedError.

    Args:
        outside: what `traces_outside` returned before the shards began.
    """
    linen = sys.modules.get("flax.linen")
    if linen is None:
        yield
        return

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        scope = context.module.scope
        if scope is not None and any(scope.root.trace_level == level for level in outside):
            raise UnsupportedError(
                refusal_text(
                    function,
                    f"fn calls {type(context.module).__name__}, a module that is bound outside of it",
                    advice="Tile the module, as in tile(module)(x), or apply it to variables handed over as arguments.",
                )
            )
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield


def traces_outside(fn: Callable[..., Any]) -> list[Any]:
    """Return the levels of tracing that a module bound before the shards began may belong to; nothing without linen."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    from flax.core import tracers

    held = [*linen.module._context.module_stack, *module_state.closed_over(fn)]
    return [tracers.current_trace(), *(value.scope.root.trace_level for value in held if is_bound(value))]

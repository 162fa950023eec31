"""One call of a tiled function: its shards, as functions of arrays alone, and the loop over them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, error_text, fail_with
from shared_specs.shards import ShardPlan, plan_tiling
from shared_specs.tile.token_layout import noting_what_broadcasts
from tiled_jax import backends
from tiled_jax.core.loops import varying_of
from tiled_jax.core.own_tokens import Split, split_of
from tiled_jax.core.row_shards import may_stop_early
from tiled_jax.tile import linen_modules, token_layout
from tiled_jax.tile.closures import Closure
from tiled_jax.tile.module_state import Modules
from tiled_jax.tile.shared_gradients import SharedSums
from tiled_jax.tile.split import plans, run_split, shards_in_all


def call_tiled(
    fn: Callable[..., Any], options: Tiling, rngs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what fn returns for these arguments, computed shard by shard. rngs: see `tile`."""
    fn, kwargs = linen_modules.lifted(fn, args, kwargs, rngs)
    if rngs is not None and "rngs" in kwargs:
        fail_with("tile", "rngs is given twice, to tile and to the call", advice="Give it once.")
    key = rngs if isinstance(rngs, jax.Array) else None
    if rngs is not None and key is None:
        kwargs = {**kwargs, "rngs": rngs}  # streams are split and advanced as those of any module among the arguments
    layout = token_layout.split(fn, args, kwargs)
    with noting_what_broadcasts(layout, [array.shape for array in layout.whole()]):
        return run_shards(fn, layout, options, key)


def run_shards(
    fn: Callable[..., Any],
    layout: token_layout.Layout,
    options: Tiling,
    key: jax.Array | None = None,
    counted: jax.Array | None = None,
) -> Any:
    """Return fn's results over all shards; random streams of its modules are advanced once.

    counted: which tokens may be the only ones that are run, bool [*leading dims]; None: all are.
    """
    tokens, device = layout.tokens, backends.device_kind()
    arrays = layout.cut()
    split = split_of(layout.function, arrays[0], [*arrays[1:], *layout.whole()], (), None)
    if split is not None and split.tokens is not None and not split.token_axes:
        split = None  # Explicit axes that cut no tokens are fn's own matter
    if split is not None:
        _check_untyped(layout.function, split)
    plan = plan_tiling(tokens, options, device=device)
    if counted is not None and (len(plan) <= 1 or not may_stop_early((), counted, None, split)):
        counted = None
    if split is not None or counted is not None:
        found = plans(split, tokens, options)
        apart = split is not None and split.tokens is not None
        shard = Shard(fn, layout, key, shards_in_all(found, tokens), apart=apart)
        if split is None and counted is not None:
            arrays, counted = layout.rows(), counted.reshape(-1)
        results = run_split(layout.function, shard.run, arrays, shard.keys, split, found, shard.held, counted)
        shard.modules.advance()
        if split is not None and split.tokens and any(split.tokens[1:]):
            shard.check_leading_dims()
        return shard.assemble(results)
    shard = Shard(fn, layout, key, max(1, len(plan)))
    results = _loop(shard, plan, layout.rows())
    shard.modules.advance()
    return shard.assemble(results)


def _check_untyped(function: str, split: Split) -> None:
    """fn is traced for a device's own shards without the types that such a `shard_map` has: UnsupportedError."""
    if split.tokens is not None and split.typed:
        inside, left = ", ".join(split.mesh.manual_axes), ", ".join(split.token_axes)
        rule = f"cut by no Explicit axis ({left}) that a shard_map over {inside} with check_vma=True leaves out"
        advice = "Name all axes in the shard_map, or give it check_vma=False."
        raise UnsupportedError(error_text(function, "x", rule, "one that is", advice=advice))


class Shard:
    """fn on the rows of one shard, as a function of arrays alone."""

    def __init__(
        self,
        fn: Callable[..., Any],
        layout: token_layout.Layout,
        key: jax.Array | None,
        shards: int,
        *,
        apart: bool = False,
    ) -> None:
        """`apart`: what fn reads is in `held`, for others to be given in its place."""
        # What shards share varies as the tokens do: `shard_map` adds up gradients once, and not in every shard.
        axes = varying_of(layout.cut())
        self._layout, self._has_key = layout.varying_over(axes), key is not None
        self._fn, self._owner = with_owner(fn)
        self._outside = linen_modules.traces_outside(fn)
        self._closure = Closure(self._fn) if apart else None
        own = [*self._owner, *layout.modules()]
        self._owned = len(own)
        own += self._closure.modules if self._closure else []
        self.modules = Modules(own, shards, layout.function, axes)
        self.held: list[jax.Array] = []
        if self._closure:
            self.held = [*layout.whole(), *self.modules.arrays(), *self._closure.arrays]
        # Of every random stream the keys of all shards, and those split from `key`.
        self.keys = self.modules.shard_keys + ([] if key is None else [jax.random.split(key, shards)])
        self._form: tuple[list[token_layout.Form], Any] | None = None

    def run(
        self, keys: Sequence[jax.Array], pieces: Sequence[jax.Array], held: Sequence[jax.Array] = ()
    ) -> list[jax.Array]:
        """Return the rows [t, ...] of every result, from the rows of the arguments and this shard's keys."""
        given, own_keys = iter(held), keys[: len(self.modules.shard_keys)]
        layout = self._layout.with_whole(given) if self._closure else self._layout
        inside = self.modules.inside(own_keys, given if self._closure else None)
        owner, modules = inside.modules[: len(self._owner)], inside.modules[len(self._owner) : self._owned]
        fn = self._closure.over(given, iter(inside.modules[self._owned :])) if self._closure else self._fn
        args, kwargs = layout.arguments(pieces, modules)
        if self._has_key:
            kwargs["rngs"] = keys[-1]
        with linen_modules.refusing_bound_modules(self._layout.function, self._outside):
            results = fn(*owner, *args, **kwargs)
        self.modules.drew(inside.written())
        leaves, treedef = jax.tree.flatten(results)
        t = pieces[0].shape[0]
        forms = [token_layout.form_of(index, leaf, t, self._layout) for index, leaf in enumerate(leaves)]
        self._form = forms, treedef
        return [jnp.asarray(leaf).reshape(t, *form.rest) for leaf, form in zip(leaves, forms, strict=True)]

    def check_leading_dims(self) -> None:
        """Raise UnsupportedError where a result would have to be flattened across a dim that a type says is cut."""
        assert self._form is not None
        lead = self._layout.lead
        for index, form in enumerate(self._form[0]):
            if form.shape[: len(lead)] != lead:
                rule, got = "[1, t, ...] where Explicit mesh axes cut a later dim of x", "[t, ...]"
                advice = "Return it with x's leading dims."
                name = f"output {index} of fn"
                raise UnsupportedError(error_text(self._layout.function, name, rule, got, advice=advice))

    def assemble(self, results: Sequence[jax.Array]) -> Any:
        """Return fn's results from their rows [T, ...]."""
        assert self._form is not None  # every call runs at least one shard
        forms, treedef = self._form
        return jax.tree.unflatten(treedef, [a.reshape(form.shape) for a, form in zip(results, forms, strict=True)])


def with_owner(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return fn as a function of the module it belongs to, and that module: itself, or the object of a bound method."""
    if isinstance(fn, nnx.Module):
        return lambda module, *args, **kwargs: module(*args, **kwargs), [fn]
    owner = getattr(fn, "__self__", None)
    if inspect.ismethod(fn) and isinstance(owner, nnx.Module):
        return fn.__func__, [owner]
    return fn, []


def _loop(shard: Shard, plan: ShardPlan, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the rows [T, ...] of every result: the shorter last shard straight-line, the equal ones in one rolled loop."""
    if len(plan) <= 1:
        return jax.checkpoint(shard.run)([keys[0] for keys in shard.keys], arrays)
    equal = plan.tokens // plan.shard_tokens
    stop, sums = equal * plan.shard_tokens, SharedSums()
    if stop == plan.tokens:
        return _equal_shards(shard, sums, equal, arrays)
    rest = [keys[-1] for keys in shard.keys], [a[stop:] for a in arrays]
    last = jax.checkpoint(sums.over(shard.run, *rest))(*rest)
    first = _equal_shards(shard, sums, equal, [a[:stop] for a in arrays])
    return [jnp.concatenate(pair) for pair in zip(first, last, strict=True)]


def _equal_shards(shard: Shard, sums: SharedSums, count: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    cut = [a.reshape(count, a.shape[0] // count, *a.shape[1:]) for a in arrays]
    keys = [each[:count] for each in shard.keys]
    run = sums.over(shard.run, [each[0] for each in keys], [a[0] for a in cut])
    # A loop keeps its body's recomputation apart from forward by itself.
    body = jax.checkpoint(run, prevent_cse=False)
    _, results = lax.scan(lambda _, inputs: (None, body(*inputs)), None, (keys, cut))
    return [a.reshape(-1, *a.shape[2:]) for a in results]

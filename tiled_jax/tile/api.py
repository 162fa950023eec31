"""`tile`: any token-wise function or module, computed shard by shard and recomputed in backward, exactly."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, error_text, fail_with
from shared_specs.shards import ShardPlan, plan_tiling
from shared_specs.tile.checks import check_tile
from tiled_jax import backends
from tiled_jax.core.loops import varying_of
from tiled_jax.core.own_tokens import split_of
from tiled_jax.tile import linen_modules, token_layout
from tiled_jax.tile.closures import Closure
from tiled_jax.tile.module_state import Modules, check_closure, check_rngs
from tiled_jax.tile.shared_gradients import SharedSums
from tiled_jax.tile.split import plans, run_split, shards_in_all


def tile(
    fn: Callable[..., Any], *, num_shards: int | None = None, tiling: Tiling | None = None, rngs: Any = None
) -> Callable[..., Any]:
    """Return a function of the same arguments that computes fn shard by shard, with exact gradients.

    fn(x)[rows] = fn(x[rows]) is what makes a function token-wise, and is not checked. Of what fn computes only one
    shard exists at a time; backward runs fn again, shard by shard, on the same random numbers.

    A shard of x is [1, t, H] where x has three or more dims, and [t, H] where it has two. In the first case other arrays
    among the arguments that have x's leading dims are cut the same way. Everything else is passed whole: modules,
    other arrays, and beside x [T, H] every other array, since one with T rows may be a weight. Results may be any pytree
    of arrays [1, t, ...] or [t, ...]; they come back as [*leading dims, ...] or [T, ...].

    Gradients reach the arguments, what fn closes over, and the parameters of modules, given as fn, as arguments or as
    the object of a bound method. A module that draws random numbers has to come in one of these three ways. Inside
    `jax.shard_map` so should weights: devices add up their gradients once, but those of a closure in every shard.
    Inside a linen module fn is one of its modules or methods: every shard draws from splits of its streams, and `init`
    makes its variables by one token.

    For arrays on a mesh, outside of `jax.shard_map`, every device runs fn on the tokens that it has, in shards of its own, and
    what shards share gets one sum; random numbers then depend on how the tokens are sharded. On Explicit axes fn sees plain
    arrays, everything but the tokens whole.

    Args:
        fn: an nnx.Module, a bound linen module or a function; its first argument is x.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. keep and memory_budget do not apply.
        rngs: a key, nnx.Rngs or nnx.RngStream for a function that draws random numbers: every shard calls
            fn(..., rngs=its own split). A key is used by every call alike; streams advance once per call. A key among
            fn's other arguments is passed whole, and every shard draws the same numbers from it.
    Returns:
        A callable. Its x is [T, H] or [B, S, H] (any leading dims); T = 0 runs fn once without tokens.
    Numerics: gradients of what shards share are summed in float32 (float64 for float64) and rounded once.
    Memory: keeps the arguments; peak is what fn needs for one shard, plus the float32 sums.
    Raises:
        TypeError: fn cannot be called, x is no array, rngs is neither key nor streams, a result is no array.
        SpecError: x has less than two dims; a result has no row per token.
        UnsupportedError: fn writes other state of a module than its random streams, closes over a random key, or calls a
            linen module that is bound outside of it; where Explicit mesh axes cut x, an array on the mesh that fn reads
            from an object that is neither a pytree nor a Flax module, or a result [t, ...] of x cut in a later dim.
    Source: `lax.scan` over `jax.checkpoint`; the sharding idea is DeepSpeed's ALST (arXiv 2506.13996).
    Example:
        >>> block = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
        >>> tile(block, num_shards=4)(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """
    options = check_tile(fn, num_shards, tiling)
    check_rngs("tile", rngs)
    check_closure("tile", fn)

    def tiled(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, options, rngs, args, kwargs)

    return wraps(fn)(tiled) if inspect.isroutine(fn) else tiled


def _call(fn: Callable[..., Any], options: Tiling, rngs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fn, kwargs = linen_modules.lifted(fn, args, kwargs, rngs)
    if rngs is not None and "rngs" in kwargs:
        fail_with("tile", "rngs is given twice, to tile and to the call", advice="Give it once.")
    key = rngs if isinstance(rngs, jax.Array) else None
    if rngs is not None and key is None:
        kwargs = {**kwargs, "rngs": rngs}  # streams are split and advanced as those of any module among the arguments
    return run_shards(fn, token_layout.split(fn, args, kwargs), options, key)


def run_shards(
    fn: Callable[..., Any], layout: token_layout.Layout, options: Tiling, key: jax.Array | None = None
) -> Any:
    """Return fn's results over all shards; random streams of its modules are advanced once."""
    tokens, device = layout.tokens, backends.device_kind()
    arrays = layout.cut()
    split = split_of(layout.function, arrays[0], [*arrays[1:], *layout.whole()], (), None)
    if split is not None and split.tokens is not None and not split.token_axes:
        split = None  # Explicit axes that cut no tokens are fn's own matter
    if split is not None:
        found = plans(split, tokens, options)
        shard = Shard(fn, layout, key, shards_in_all(found, tokens), apart=split.tokens is not None)
        results = run_split(layout.function, shard.run, arrays, shard.keys, split, found, shard.held)
        shard.modules.advance()
        if split.tokens and any(split.tokens[1:]):
            shard.check_leading_dims()
        return shard.assemble(results)
    plan = plan_tiling(tokens, options, device=device)
    shard = Shard(fn, layout, key, max(1, len(plan)))
    results = _loop(shard, plan, layout.rows())
    shard.modules.advance()
    return shard.assemble(results)


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

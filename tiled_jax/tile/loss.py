"""`tiled_loss`: any loss of hidden states, computed shard by shard and recomputed in backward, with sums that are sums."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shared_specs.config import Tiling
from shared_specs.core import checks
from shared_specs.errors import fail_type
from shared_specs.shards import plan_tiling
from shared_specs.tile import means
from tiled_jax import backends
from tiled_jax.core.products import wide
from tiled_jax.tile import token_layout
from tiled_jax.tile.call import Shard, run_shards, with_owner

_NAME = "tiled_loss"
_LOOKS = means.Looks()
_UNUSED = ("vocab_shards", "keep", "memory_budget", "deterministic")


def tiled_loss(
    fn: Callable[..., Any], x: jax.Array, *args: Any, num_shards: int | None = None, tiling: Tiling | None = None
) -> Any:
    """Return fn(x, *args), computed shard by shard: sums are added up, values per token concatenated. Gradients are exact.

    fn gets one shard of tokens at a time and returns any pytree of scalars, each a SUM over its tokens, and of values per
    token. Only one shard of fn's intermediate results (such as logits) exists at a time. Backward runs fn again.

    A shard of x is [1, t, H] if x has three or more dims, and [t, H] if it has two. Every array among args with x's leading
    dims is split the same way. For x [T, H] this is every array with T rows, so a weight with T rows must be in the closure
    of fn. Everything else is passed whole. Gradients reach the arguments, the closure of fn, and the parameters of modules
    that are fn or arguments. `tile` describes modules and their random numbers.

    Args:
        fn: a module or a function of a shard of x and of args. It must not divide by its own number of tokens. A mean over
            unequal shards, or over unequal numbers of valid labels, would get wrong weights.
        x: [T, H], [B, S, H] or any leading dims. What the loss is computed from.
        args: labels, masks, weights: anything.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. The other fields do not apply.
    Returns:
        fn's structure: sums [] in float32 (float64 for float64; integers stay what they are), values per token
        [same leading dims, ...].
    Numerics: fn's own; its sums over shards, and gradients of what shards share, in float32, rounded once.
    Memory: keeps the arguments; the peak is what fn needs for one shard. Cost: fn runs twice on every token. `tiled_loss` does
        not know which tokens fn ignores. (The losses of `models` whose head is no plain weight run only tokens with a label.)
    Raises:
        SpecError: x has less than two dims; a result is neither a scalar nor one value per token; fn returns a mean,
        which is looked for at the first call with a function and kinds of arguments, where values can be read (not under
        `jit`, nor on Explicit mesh axes). TypeError: fn cannot be called, x is no array.
    Source: `tile`; losses shard by shard: ALST, arXiv 2506.13996.
    Example:
        >>> def fn(x, labels, weight):
        ...     picked = jnp.take_along_axis(jax.nn.log_softmax(x @ weight), labels[..., None], axis=-1)
        ...     return -jnp.sum(picked), labels.size
        >>> x, labels, weight = jnp.ones((2, 5, 8)), jnp.zeros((2, 5), jnp.int32), jnp.zeros((8, 4))
        >>> total, count = tiled_loss(fn, x, labels, weight, num_shards=3)
        >>> print(f"{float(total) / int(count):.3f}")
        1.386
    """
    if not callable(fn):
        fail_type(_NAME, "fn", "a module or a function", type(fn).__name__)
    shape = tuple(x.shape) if isinstance(x, jax.Array | np.ndarray) else None
    options = checks.resolve_tiling(_NAME, num_shards, 0.0, tiling, x=shape, unused=_UNUSED)
    sums = _Sums(fn)
    layout = token_layout.split(sums.rows, (x, *sums.owner, *args), {}, function=_NAME)
    _refuse_means(sums, fn, layout, options)
    return sums.total(run_shards(sums.rows, layout, options))


def tiled_loss_of(fn: Callable[..., Any], x: jax.Array, *args: Any, tiling: Tiling, counted: jax.Array) -> Any:
    """`tiled_loss` of a fn that is known to return sums to which only some tokens add anything, and which alone are run.

    Those come first, and as many shards are run as they need, a number that each device counts for itself (all where
    `row_shards.may_stop_early` says so, and in a call of one shard).

    Args:
        counted: which tokens those are, bool [*leading dims of x].
    """
    options = checks.resolve_tiling(_NAME, None, 0.0, tiling, x=tuple(x.shape), unused=_UNUSED)
    sums = _Sums(fn)
    layout = token_layout.split(sums.rows, (x, *sums.owner, *args), {}, function=_NAME)
    return sums.total(run_shards(sums.rows, layout, options, counted=counted))


class _Sums:
    """fn as a token-wise function: a scalar becomes a row per token, the scalar in the first and zero in the others.

    rows(x, *rest): fn's results for a shard of x; `rest`: fn's owner, if it has one, and its arguments.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        call, self.owner = with_owner(fn)
        own, spread = len(self.owner), self._spread
        self._scalar: list[bool] = []

        def rows(x: jax.Array, *rest: Any) -> Any:
            return spread(x, call(*rest[:own], x, *rest[own:]))

        self.rows = rows

    def _spread(self, x: jax.Array, results: Any) -> Any:
        leaves, treedef = jax.tree.flatten(results)
        leaves = [jnp.asarray(leaf) if isinstance(leaf, bool | int | float | np.generic) else leaf for leaf in leaves]
        self._scalar = [isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim == 0 for leaf in leaves]
        # With x's dims: where a mesh cuts the last of them, a flat one would have to be gathered.
        first = (jnp.arange(x.shape[-2]) == 0).reshape(x.shape[:-1])
        spread = [
            jnp.where(first, _wide(leaf), 0) if scalar else leaf
            for leaf, scalar in zip(leaves, self._scalar, strict=True)
        ]
        return jax.tree.unflatten(treedef, spread)

    def total(self, results: Any) -> Any:
        """Return fn's results over all shards, from what `rows` gives."""
        leaves, treedef = jax.tree.flatten(results)
        summed = [jnp.sum(a) if scalar else a for a, scalar in zip(leaves, self._scalar, strict=True)]
        return jax.tree.unflatten(treedef, summed)

    def scalars(self, results: Sequence[jax.Array]) -> list[float]:
        """Return the floating-point scalars among the flat results of one shard, as numbers of the host."""
        pairs = zip(results, self._scalar, strict=True)
        return [float(jnp.sum(a)) for a, scalar in pairs if scalar and jnp.issubdtype(a.dtype, jnp.floating)]


def _wide(scalar: Any) -> jax.Array:
    a = jnp.asarray(scalar)
    if a.dtype == jnp.bool_:
        return a.astype(jnp.int32)
    return a.astype(wide(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def _refuse_means(sums: _Sums, fn: Callable[..., Any], layout: token_layout.Layout, options: Tiling) -> None:
    """SpecError where fn's scalars are seen to be means, if values can be read. Looks once for a function and arguments."""
    if not layout.tokens or any(map(_unreadable, layout.cut())):
        return
    arrays = layout.rows()
    shapes = tuple((str(a.dtype), a.shape[1:]) for a in arrays)
    arguments = len(layout.lead), shapes, means.signature(layout.leaves)
    if not _LOOKS.wanted(fn, arguments):
        return
    shard = Shard(sums.rows, layout, None, 1)
    keys = [each[0] for each in shard.keys]

    def scalars(tokens: list[int]) -> list[float]:
        results = shard.run(keys, [a[np.array(tokens)] for a in arrays])
        if any(map(_unreadable, results)):  # of traced parameters
            raise _Unreadable
        return sums.scalars(results)

    device = backends.device_kind()
    plan = plan_tiling(layout.tokens, options, device=device)
    try:
        told = means.look(_NAME, means.samples(layout.tokens, plan.shard_tokens), scalars)
    except _Unreadable:
        return
    _LOOKS.done(fn, arguments, told=told)


class _Unreadable(Exception):
    pass


def _unreadable(a: jax.Array) -> bool:
    if isinstance(a, Tracer) or not a.is_fully_addressable:
        return True
    return bool(jax.typeof(a).sharding.mesh.explicit_axes)  # its tokens cannot be taken one by one

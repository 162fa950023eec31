"""`tile`: any token-wise function or module, computed shard by shard and recomputed in backward, exactly."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from flax import nnx

from shared_specs.config import Tiling
from shared_specs.tile.checks import check_tile
from tiled_jax.tile import module
from tiled_jax.tile.call import call_tiled
from tiled_jax.tile.module_state import check_closure, check_rngs


def tile(
    fn: Callable[..., Any], *, num_shards: int | None = None, tiling: Tiling | None = None, rngs: Any = None
) -> Callable[..., Any]:
    """Return a function with the same arguments that computes fn shard by shard, with exact gradients. For a module: a module.

    fn(x)[rows] = fn(x[rows]) is what makes a function token-wise, and is not checked. Of what fn computes only one
    shard exists at a time; backward runs fn again, shard by shard, on the same random numbers.

    A shard of x is [1, t, H] where x has three or more dims, and [t, H] where it has two. In the first case other arrays
    among the arguments that have x's leading dims are cut the same way. Everything else is passed whole: modules,
    other arrays, and beside x [T, H] every other array, since one with T rows may be a weight. Results may be any pytree
    of arrays [1, t, ...] or [t, ...]; they come back as [*leading dims, ...] or [T, ...].

    Gradients reach the arguments, the closure of fn, and the parameters of modules. A module may be fn itself, an argument,
    or the object of a bound method. A module that draws random numbers must come in one of these three ways. Inside
    `jax.shard_map` weights should too: devices then add up their gradients once, but gradients of a closure in every shard.
    Inside a linen module, fn is one of its modules or methods. Every shard draws from splits of its streams, and `init`
    creates its variables with one token.

    For arrays on a mesh, outside of `jax.shard_map`, every device runs fn on its own tokens, in its own shards. Gradients of
    arrays that shards share get one sum. Random numbers then depend on how the tokens are sharded. On Explicit axes fn sees
    plain arrays. All of them except the tokens are whole.

    Args:
        fn: an nnx.Module, a linen module or a function; its first argument is x.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. keep and memory_budget do not apply.
        rngs: a key, nnx.Rngs or nnx.RngStream for a function that draws random numbers. Every shard calls
            fn(..., rngs=its own split). With a key every call draws the same numbers; streams advance once per call. A key
            among fn's other arguments is passed whole, and every shard draws the same numbers from it.
    Returns:
        For an nnx module, a module of a subclass that replaces it and holds the same variables under the same names. The
        same holds for an unbound linen module, in `setup` or outside of any module. For anything else, a function. Its x is
        [T, H] or [B, S, H] (any leading dims). If T = 0, fn runs once without tokens.
    Numerics: gradients of arrays that shards share are summed in float32 (float64 for float64) and rounded once.
    Memory: keeps the arguments. The peak is what fn needs for one shard, plus the float32 sums.
    Raises:
        TypeError: fn cannot be called, x is no array, rngs is neither key nor streams, a result is no array.
        SpecError: x has less than two dims; a result has no row per token.
        UnsupportedError: fn writes other state of a module than its random streams, closes over a random key, or calls a
            linen module that is bound outside of it; where Explicit mesh axes cut x, an array on the mesh that fn reads
            from an object that is neither a pytree nor a Flax module, or a result [t, ...] of x cut in a later dim.
    Source: `lax.scan` over `jax.checkpoint`; the sharding idea is DeepSpeed's ALST (arXiv 2506.13996).
    Example:
        >>> import jax.numpy as jnp
        >>> block = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
        >>> tile(block, num_shards=4)(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """
    options = check_tile(fn, num_shards, tiling)
    check_rngs("tile", rngs)
    if isinstance(fn, nnx.Module):
        return module.tiled_nnx(fn, options, rngs)
    if module.is_unbound_linen(fn):
        return module.tiled_linen(fn, options, rngs)
    check_closure("tile", fn)

    def tiled(*args: Any, **kwargs: Any) -> Any:
        return call_tiled(fn, options, rngs, args, kwargs)

    return wraps(fn)(tiled) if inspect.isroutine(fn) else tiled

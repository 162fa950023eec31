"""Checks of a tiled function and of what it returns: the same text in both halves."""

from typing import Never

from shared_specs.config import Tiling
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type


def check_tile(fn: object, num_shards: int | None, tiling: Tiling | None) -> Tiling:
    """Return the tiling of `tile`.

    Raises:
        TypeError: fn cannot be called. SpecError: a tiling of another kind of call.
    """
    if not callable(fn):
        fail_type("tile", "fn", "a module or a function", type(fn).__name__)
    tiling = checks.resolve_tiling("tile", num_shards, 0.0, tiling, unused=("vocab_shards", "deterministic"))
    if tiling.keep:
        fail("tile", "keep", "0", tiling.keep, advice="A generic function has no gate and up to keep.")
    if tiling.memory_budget is not None:
        advice = "The bytes of a generic function are unknown; pass num_shards or shard_tokens."
        fail("tile", "memory_budget", "None", tiling.memory_budget, advice=advice)
    return tiling


def fail_rows(function: str, index: int, shape: tuple[int, ...], t: int) -> Never:
    """Refuse output `index` of fn, which has no row for each of the t tokens that fn was called with.

    The message writes t for every size equal to t: the number of tokens is an accident of the shard.

    Raises:
        SpecError: always.
    """
    rule = "[t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens"
    if function != "tile":
        rule = f"a scalar or {rule}"
    got = "[" + ", ".join("t" if size == t else str(size) for size in shape) + "]"
    fail(function, f"output {index} of fn", rule, got, advice="fn has to return one row for each token of its shard.")

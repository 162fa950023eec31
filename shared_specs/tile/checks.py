"""Checks of what a tiled function returns: the same text in both halves."""

from typing import Never

from shared_specs.errors import fail


def fail_rows(function: str, index: int, shape: tuple[int, ...], t: int) -> Never:
    """Output `index` of fn, called with t tokens, has no row per token. Lengths of t are told as such: t is how long the shard
    happened to be that it was seen with."""
    rule = "[t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens"
    if function != "tile":
        rule = f"a scalar or {rule}"
    got = "[" + ", ".join("t" if size == t else str(size) for size in shape) + "]"
    fail(function, f"output {index} of fn", rule, got, advice="fn has to return one row for each token of its shard.")

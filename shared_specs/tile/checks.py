"""Checks of what a tiled function returns: the same text in both halves."""

from typing import Never

from shared_specs.errors import fail


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

"""Shapes of a token-wise call: which arrays have one row per token, and how the results of shards become whole ones."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared_specs.errors import fail, show_shape
from shared_specs.tile.checks import fail_rows


class TokenLayout:
    """The shapes of one call, beside its arrays in a half's own `Layout`.

    Args:
        lead: leading dims of x. function: the public function called, for its messages.
    """

    lead: tuple[int, ...]
    function: str

    @property
    def tokens(self) -> int:
        return math.prod(self.lead)

    @property
    def batched(self) -> bool:
        """x has three or more dims, so a shard is [1, t, ...] and not [t, ...]."""
        return len(self.lead) > 1

    def flat_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array with the leading dims of x as [T, ...]."""
        return (self.tokens, *shape[len(self.lead) :])

    def form(self, index: int, shape: tuple[int, ...], t: int) -> "Form":
        """Return the form of fn's result number `index`, which is of this shape for a shard of t tokens.

        Raises:
            SpecError: the result has no row per token.
        """
        if self.batched and shape[:2] == (1, t):
            return Form((*self.lead, *shape[2:]), shape[2:], True)
        if shape[:1] == (t,):
            return Form((self.tokens, *shape[1:]), shape[1:], False)
        fail_rows(self.function, index, shape, t)


@dataclass(frozen=True)
class Form:
    """How one result is stored: rows [T, *rest], seen as `shape`: [*lead, *rest] where the shard's was [1, t, *rest]."""

    shape: tuple[int, ...]
    rest: tuple[int, ...]
    batched: bool

    def shard_shape(self, t: int) -> tuple[int, ...]:
        """Return the shape of this result for a shard of t tokens."""
        return (1, t, *self.rest) if self.batched else (t, *self.rest)


def leading_dims(function: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading dims of x.

    Raises:
        SpecError: x has no dim of tokens beside its last one.
    """
    if len(shape) < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(shape))
    return shape[:-1]


def has_rows(shape: tuple[int, ...], lead: tuple[int, ...]) -> bool:
    """Return whether an array of this shape begins as x does, and so is cut with it."""
    return shape[: len(lead)] == lead


def first_name(fn: Callable[..., Any]) -> str:
    """Return the name of fn's first parameter, for a call that gives x by name; "" where fn does not say."""
    try:
        return next(iter(inspect.signature(fn).parameters), "")
    except ValueError:  # a builtin without a signature
        return ""

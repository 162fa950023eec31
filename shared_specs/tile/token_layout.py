"""Shapes of a token-wise call: which arrays have one row per token, and how the results of shards become whole ones."""

import inspect
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
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


def broadcasts_over_tokens(shape: tuple[int, ...], lead: tuple[int, ...]) -> bool:
    """Return whether an array of this shape begins as one that has the leading dims of x by broadcasting.

    Example:
        >>> [broadcasts_over_tokens(shape, (2, 7)) for shape in ((1, 7), (7,), (2, 1, 3), (1, 1), (3, 7))]
        [True, True, True, False, False]
    """
    for dims in range(1, min(len(lead), len(shape)) + 1):
        pairs = [*zip(shape[:dims], lead[-dims:], strict=True)]
        if all(size in (1, of_x) for size, of_x in pairs) and any(size > 1 for size, _ in pairs):
            return True
    return False


@contextmanager
def noting_what_broadcasts(layout: TokenLayout, whole: Iterable[tuple[int, ...]]) -> Generator[None]:
    """Tell, beside an error of fn, of arrays that broadcast over the tokens and were passed whole. whole: their shapes.

    fn may mean such an array to be whole, and so it is not refused.
    """
    try:
        yield
    except Exception as error:
        found = [shape for shape in whole if broadcasts_over_tokens(shape, layout.lead)]
        if found:
            error.add_note(_note(layout, found[0]))
        raise


def _note(layout: TokenLayout, shape: tuple[int, ...]) -> str:
    lead = show_shape(layout.lead)
    cut = f"an argument {show_shape(shape)} was passed whole to every shard of tokens, as all without x's leading dims {lead}"
    advice = f"Where it is of tokens, expand it to {lead}."
    if has_rows(shape, layout.lead):
        cut = (
            f"an argument {show_shape(shape)} was passed whole to every shard of tokens, as all beside an x of two dims"
        )
        advice = "Where it is of tokens, give x and it a leading dim of 1."
    return f"{layout.function}: {cut}. {advice}"


def first_name(fn: Callable[..., Any]) -> str:
    """Return the name of fn's first parameter, for a call that gives x by name; "" where fn does not say."""
    try:
        return next(iter(inspect.signature(fn).parameters), "")
    except ValueError:  # a builtin without a signature
        return ""

"""Bytes of a layer that has no formula: measured at some lengths, and from these at every other one."""

from collections.abc import Callable
from typing import NamedTuple

FEWEST, MOST = 2**10, 2**17  # tokens of the shortest and the longest sequence that is measured
ENOUGH = 3  # lengths, each twice the one before, that are measured at least
STEPS = 8_000  # operations of the longest measurement: layers with loops over tokens are measured at fewer of them
_SQUARED = 3.0  # times as large of twice the tokens: between what grows with tokens and with their square


class Measurement(NamedTuple):
    """One run of a layer forward and backward.

    Attributes:
        peak: bytes at once. sizes: bytes of each array, every number once. steps: operations.
    """

    peak: int
    sizes: frozenset[int]
    steps: int


class Lengths:
    """Bytes of a layer by tokens of a sequence, from as few measurements as a question needs.

    Up to the longest that is measured: the line between two neighbours, which is never below what grows ever faster. Beyond
    it: the line through the last two or, if the largest array that grows does so with the square of the tokens, the parabola
    through three.
    """

    def __init__(self, measure: Callable[[int], Measurement], most: int | None = None, window: int = 0) -> None:
        """most: tokens of the longest sequence that can run; None: any number. window: tokens from which on layers do something
        else, such as masks; 0: they do the same."""
        self._measure, self._known, self._window = measure, dict[int, Measurement](), window
        self._most = MOST if most is None else min(MOST, most)
        self._longest: int | None = None

    def bytes_at(self, tokens: int) -> int:
        """Return the bytes of sequences of so many tokens."""
        if tokens <= FEWEST or self._most < FEWEST << (ENOUGH - 1):
            return self._at(tokens).peak
        longest = self._found_longest()
        if tokens > longest:
            return self._beyond(tokens, longest)
        above = _power_from(tokens)
        if above // 2 < self._window <= above:
            return self._at(tokens).peak
        return _line(tokens, above // 2, self._at(above // 2).peak, above, self._at(above).peak)

    def _beyond(self, tokens: int, longest: int) -> int:
        first, second, third = (self._at(longest // parts) for parts in (4, 2, 1))
        found = _line(tokens, longest // 2, second.peak, longest, third.peak)
        same = first.sizes & second.sizes & third.sizes  # such as those of weights
        before, largest = (max(each.sizes - same, default=0) for each in (second, third))
        if largest < _SQUARED * before:
            return found
        slopes = (second.peak - first.peak) / (longest // 4), (third.peak - second.peak) / (longest // 2)
        bend = max(0.0, (slopes[1] - slopes[0]) / (3 * longest // 4))
        return found + int(bend * (tokens - longest) * (tokens - longest // 2))

    def _found_longest(self) -> int:
        """Return the longest sequence of which a measurement has few enough operations, by those of the shortest."""
        if self._longest is None:
            longest = least = FEWEST << (ENOUGH - 1)
            grows = (self._at(least).steps - self._at(least // 2).steps) / (least // 2)
            wanted = _power_from(max(1, self._window)) << (ENOUGH - 1)  # all that is beyond a window, too
            while 2 * longest <= self._most and (
                longest < wanted or self._at(least).steps + grows * (2 * longest - least) <= STEPS
            ):
                longest *= 2
            self._longest = longest
        return self._longest

    def _at(self, tokens: int) -> Measurement:
        if tokens not in self._known:
            self._known[tokens] = self._measure(tokens)
        return self._known[tokens]


def _power_from(tokens: int) -> int:
    """Return the least power of 2 that is no less."""
    return 1 << (tokens - 1).bit_length()


def _line(tokens: int, low: int, of_low: int, high: int, of_high: int) -> int:
    return of_low + (of_high - of_low) * (tokens - low) // (high - low)

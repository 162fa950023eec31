"""`plan` of layers that are measured: bytes at every length from measurements at a few."""

from collections.abc import Callable

import pytest

from shared_specs.app.plan.function.measured import FEWEST, MOST, STEPS, Lengths, Measurement

FIXED, ROW = 7_000_000, 3000
LENGTHS = (1, 700, 1024, 1500, 4096, 5000, 65536, 131072, 200_000, 10_000_000)


class Layer:
    """Measurements of a layer whose bytes and operations are these functions of the tokens."""

    def __init__(
        self, peak: Callable[[int], int], steps: Callable[[int], int] = lambda _: 100, square: int = 0
    ) -> None:
        self.peak, self.steps, self.square = peak, steps, square
        self.asked: list[int] = []

    def __call__(self, tokens: int) -> Measurement:
        assert tokens not in self.asked, "measured twice"
        self.asked.append(tokens)
        sizes = {10**12, tokens, 2 * tokens, 4 * tokens, self.square * tokens**2}  # the largest are weights
        return Measurement(self.peak(tokens), frozenset(sizes), self.steps(tokens))


@pytest.mark.parametrize("square", [0, 2])
def test_what_grows_with_tokens_or_their_square(square: int) -> None:
    """Lines are exact everywhere; parabolas beyond what is measured, and below the line between two lengths otherwise."""
    layer = Layer(lambda t: FIXED + ROW * t + square * t * t, square=square)
    lengths = Lengths(layer)
    for tokens in LENGTHS:
        found, exact = lengths.bytes_at(tokens), layer.peak(tokens)
        if square and FEWEST < tokens < MOST:
            assert exact <= found <= 1.13 * exact
        else:
            assert found == exact
    assert max(layer.asked) == MOST


def test_the_larger_of_two_moments() -> None:
    """What a few tokens hide behind the fixed bytes of another moment is seen at the longest, and goes on."""
    layer = Layer(lambda t: max(40_000_000 + t, ROW * t))
    lengths = Lengths(layer)
    for tokens in LENGTHS:
        assert layer.peak(tokens) <= lengths.bytes_at(tokens) <= 1.2 * layer.peak(tokens)
    assert lengths.bytes_at(10_000_000) == 10_000_000 * ROW


def test_loops_over_tokens_are_measured_at_fewer() -> None:
    layer = Layer(lambda t: FIXED + ROW * t, lambda t: 50 + t)
    assert Lengths(layer).bytes_at(10_000_000) == layer.peak(10_000_000)
    assert max(layer.asked) == 4096  # of whose double there are more operations
    assert layer.steps(8192) > STEPS > layer.steps(4096)
    assert len(layer.asked) <= 4


def test_a_window_is_measured_beyond() -> None:
    """From its length on there is a mask: lengths in which that begins are measured themselves, whatever the operations."""
    window = 5000
    layer = Layer(lambda t: FIXED + ROW * t + (t >= window) * t * t, lambda t: 10 * t, square=1)
    lengths = Lengths(layer, window=window)
    for tokens in (4999, 5000, 5001, 8000, 100_000, 3_000_000):
        assert layer.peak(tokens) <= lengths.bytes_at(tokens) <= 1.13 * layer.peak(tokens)
    assert lengths.bytes_at(5000) == layer.peak(5000)
    assert max(layer.asked) == 4 * 8192


@pytest.mark.parametrize("most", [600, 2048, 5000])
def test_no_more_tokens_than_there_are_positions(most: int) -> None:
    layer = Layer(lambda t: FIXED + ROW * t)
    lengths = Lengths(layer, most)
    for tokens in (1, 500, most):
        assert lengths.bytes_at(tokens) == layer.peak(tokens)
    assert max(layer.asked) <= most

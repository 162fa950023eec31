"""Means among the scalars of a loss by shards: at which tokens, how and how often one looks. No framework."""

import functools
import gc
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from shared_specs import SpecError
from shared_specs.tile import means

MEAN = r"^tiled_loss: fn must be a sum over its tokens, got a mean. Return sums \(reduction='sum'\) and divide"


def samples(tokens: int, shard_tokens: int) -> list[list[int]]:
    return list(means.samples(tokens, shard_tokens))


@pytest.mark.parametrize(("tokens", "shard"), [(1, 1), (5, 2), (8, 8), (100, 30), (5000, 5000), (131072, 8192)])
def test_tokens_are_spread_over_all(tokens: int, shard: int) -> None:
    """More in every round, up to half a shard; each once; the last gap no longer than the others."""
    rounds = samples(tokens, shard)
    assert len(rounds[0]) == min(8, tokens)
    assert len(rounds[-1]) == min(tokens, max(64, shard // 2))
    for chosen in rounds:
        assert chosen == sorted(set(chosen))
        assert chosen[0] == 0
        assert tokens - chosen[-1] <= -(-tokens // len(chosen))


def scalars(values: np.ndarray, how: Callable[[np.ndarray], float]) -> Callable[[list[int]], list[float]]:
    return lambda chosen: [how(values[chosen])]


def looked(values: np.ndarray, how: Callable[[np.ndarray], float], shard: int = 10**6) -> bool:
    return means.look("tiled_loss", means.samples(len(values), shard), scalars(values, how))


def valid_mean(values: np.ndarray) -> float:
    counted = values[values != 0]
    return float(counted.mean()) if len(counted) else nan


def late(valid: int, tokens: int = 5000) -> np.ndarray:
    """Prompts: only the last tokens count."""
    values = np.zeros(tokens)
    values[-valid:] = np.linspace(0.5, 2.5, valid)
    return values


@pytest.mark.parametrize("valid", [5000, 40, 2])
def test_a_mean_over_what_counts_is_found_wherever_it_lies(valid: int) -> None:
    with pytest.raises(SpecError, match=MEAN):
        looked(late(valid), valid_mean)
    assert looked(late(valid), lambda v: float(v.sum()))


@pytest.mark.parametrize("how", [np.mean, np.max, lambda _: 0.7], ids=["mean", "maximum", "constant"])
def test_what_does_not_grow_with_the_tokens_is_found(how: Any) -> None:
    with pytest.raises(SpecError, match=MEAN):
        looked(np.linspace(-1, 4, 100), how)


@pytest.mark.parametrize(
    "values",
    [np.zeros(100), np.full(100, nan), np.full(100, inf), np.tile([1.0, -1.0], 50)],
    ids=["0", "nan", "inf", "+-"],
)
@pytest.mark.parametrize("how", [np.sum, np.mean], ids=["sum", "mean"])
def test_nothing_is_told_of_zeros_and_of_what_is_no_number(values: np.ndarray, how: Any) -> None:
    assert not looked(values, how)


def test_every_scalar_has_to_be_told() -> None:
    both = lambda chosen: [float(len(chosen)), 0.0]  # noqa: E731
    assert not means.look("tiled_loss", means.samples(9, 9), both)


def loss(reduction: str, scale: float = 1.0) -> Callable[[], Any]:
    return lambda: (reduction, scale)


class Head:
    def __init__(self, reduction: str) -> None:
        self.loss = type("Loss", (), {})()
        self.loss.reduction = reduction

    def compute(self) -> None: ...


def test_it_is_looked_once_for_a_function_made_anew() -> None:
    """Known by its code and the words it closes over, not by numbers, which change from step to step."""
    looks = means.Looks()
    assert looks.wanted(loss("sum"), ())
    looks.done(loss("sum"), (), told=True)
    assert not looks.wanted(loss("sum"), ())
    assert not looks.wanted(loss("sum", 0.5), ())
    assert looks.wanted(loss("mean"), ())
    assert looks.wanted(loss("sum"), ("float16",))
    partial = functools.partial(max, default="sum")
    looks.done(partial, (), told=True)
    assert not looks.wanted(functools.partial(max, default="sum"), ())
    assert looks.wanted(functools.partial(max, default="mean"), ())


def test_objects_are_told_apart_by_the_words_they_hold() -> None:
    looks = means.Looks()
    looks.done(Head("sum").compute, (), told=True)
    assert not looks.wanted(Head("sum").compute, ())
    assert looks.wanted(Head("mean").compute, ())


def test_where_nothing_is_told_it_is_looked_three_times() -> None:
    looks = means.Looks()
    for _ in range(3):
        assert looks.wanted(loss("sum"), ())
        looks.done(loss("sum"), (), told=False)
    assert not looks.wanted(loss("sum"), ())


def test_a_function_that_is_called_in_ever_new_ways_is_not_looked_at_for_ever() -> None:
    looks = means.Looks()
    wanted = []
    for i in range(40):
        wanted.append(looks.wanted(loss(str(i)), ()))
        if wanted[-1]:
            looks.done(loss(str(i)), (), told=True)
    assert sum(wanted) == 16


def test_no_function_is_kept_alive() -> None:
    looks = means.Looks()
    for i in range(5):
        scope: dict[str, Any] = {}
        exec(f"def fn(x):\n    return x + {i}", scope)
        looks.done(scope.pop("fn"), (), told=True)
    gc.collect()
    assert not looks._left

"""What `tiled_loss` refuses: means instead of sums, wrong arguments, wrong results, a second derivative."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs import SpecError, Tiling, UnsupportedError
from tests.tile.test_torch_tiled_loss import HIDDEN, VOCAB, draw, labels, make_head, sum_and_count
from tiled_torch import tiled_loss


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("dims", [(12,), (2, 6)], ids=str)
def test_a_mean_is_refused(dims: tuple[int, ...], num_shards: int) -> None:
    weight, x, targets = draw(VOCAB, HIDDEN, seed=5), draw(*dims, HIDDEN), labels(*dims)

    def fn(x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = (x @ weight.T).flatten(0, -2)
        return {"size": targets.double().sum(), "loss": F.cross_entropy(logits, targets.flatten())}

    message = (
        "tiled_loss: fn must be a sum over its tokens, got a mean. "
        "Return sums (reduction='sum') and divide the results by a count."
    )
    with pytest.raises(SpecError, match="^" + re.escape(message) + "$"):
        tiled_loss(fn, x, targets, num_shards=num_shards)


def mean_or_sum(weight: Tensor, reduction: str, runs: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(x: Tensor, targets: Tensor) -> Tensor:
        runs.append(x.shape[0])
        return F.cross_entropy(x @ weight.T, targets, reduction=reduction)

    return fn


def prompts(tokens: int, valid: int) -> Tensor:
    """Only the last tokens have labels."""
    targets = torch.full((tokens,), -100)
    targets[-valid:] = 3
    return targets


@pytest.mark.parametrize(("tokens", "valid"), [(12, 9), (12, 1), (4000, 3)])
def test_a_mean_is_found_where_the_first_tokens_are_ignored(tokens: int, valid: int) -> None:
    weight, x = draw(VOCAB, HIDDEN, seed=5), draw(tokens, HIDDEN)
    with pytest.raises(SpecError, match=r"^tiled_loss: fn must be a sum over its tokens, got a mean"):
        tiled_loss(mean_or_sum(weight, "mean", []), x, prompts(tokens, valid), num_shards=1)
    tiled_loss(mean_or_sum(weight, "sum", []), x, prompts(tokens, valid), num_shards=1)


def test_a_mean_is_looked_for_once() -> None:
    """Not at every step, where it would wait for the device: fn, made anew for every call, runs for the probe and shards."""
    weight, x, runs = draw(VOCAB, HIDDEN, seed=5), draw(12, HIDDEN), list[int]()
    tiled_loss(mean_or_sum(weight, "sum", runs), x, prompts(12, 9), num_shards=3)
    runs.clear()
    for tokens in (12, 9):  # a batch of another length is no other function
        tiled_loss(mean_or_sum(weight, "sum", runs), x[:tokens], prompts(tokens, 7), num_shards=3)
    assert runs == [2, 4, 4, 4, 2, 3, 3, 3]
    with pytest.raises(SpecError, match="got a mean"):
        tiled_loss(mean_or_sum(weight, "mean", runs), x, prompts(12, 9), num_shards=3)


def test_a_sum_is_not_taken_for_a_mean() -> None:
    """Equal tokens, ignored tokens, values of zero, a maximum, a constant count, a NaN."""
    x = draw(12, HIDDEN)
    equal = torch.ones(12, HIDDEN, dtype=torch.float64)
    ignored = torch.full((12,), -100)
    weight = draw(VOCAB, HIDDEN, seed=5)
    assert tiled_loss(lambda x: x.sum(), equal, num_shards=3) == 12 * HIDDEN
    assert tiled_loss(lambda x: 0 * x.sum(), x, num_shards=3) == 0
    assert tiled_loss(lambda x, y: sum_and_count(x @ weight.T, y)[0], x, ignored, num_shards=3) == 0
    assert tiled_loss(lambda x: x.new_tensor(len(x)), x, num_shards=3) == 12
    assert tiled_loss(lambda x: (torch.nan * x).sum(), x, num_shards=3).isnan()


def identity(x: Tensor) -> Tensor:
    return x.sum()


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "fn": (
        lambda: tiled_loss(3, draw(4, 6)),  # type: ignore[arg-type]
        TypeError,
        "tiled_loss: fn must be a module or a function, got int.",
    ),
    "x": (
        lambda: tiled_loss(identity, [1.0]),  # type: ignore[arg-type]
        TypeError,
        "tiled_loss: x, the first argument, must be an array, got list.",
    ),
    "vector": (
        lambda: tiled_loss(identity, draw(6)),
        SpecError,
        "tiled_loss: x must be [tokens, hidden] or more dims, got [6].",
    ),
    "num_shards": (
        lambda: tiled_loss(identity, draw(4, 6), num_shards=0),
        SpecError,
        "tiled_loss: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose.",
    ),
    "num_shards kind": (
        lambda: tiled_loss(identity, draw(4, 6), num_shards=2.0),  # type: ignore[arg-type]
        TypeError,
        "tiled_loss: num_shards must be an integer or None, got float.",
    ),
    "both": (
        lambda: tiled_loss(identity, draw(4, 6), num_shards=2, tiling=Tiling(shard_tokens=2)),
        SpecError,
        "tiled_loss: num_shards must be left out when tiling is given, got 2.",
    ),
    "keep": (
        lambda: tiled_loss(identity, draw(4, 6), tiling=Tiling(keep=0.5)),
        SpecError,
        "tiled_loss: keep must be left out, got 0.5. This function has no use for it.",
    ),
    "vocab_shards": (
        lambda: tiled_loss(identity, draw(4, 6), tiling=Tiling(vocab_shards=2)),
        SpecError,
        "tiled_loss: vocab_shards must be left out, got 2. This function has no use for it.",
    ),
    "memory_budget": (
        lambda: tiled_loss(identity, draw(4, 6), tiling=Tiling(memory_budget=99)),
        SpecError,
        "tiled_loss: memory_budget must be left out, got 99. This function has no use for it.",
    ),
    "rows": (
        lambda: tiled_loss(lambda x: x.sum(0), draw(4, 6), num_shards=2),
        SpecError,
        "tiled_loss: output 0 of fn must be a scalar or [t, ...], or [1, t, ...] where x has three or more dims, for a shard "
        "of t tokens, got [6]. "
        "fn has to return one row for each token of its shard.",
    ),
    "a number": (
        lambda: tiled_loss(lambda x: 1.0, draw(4, 6), num_shards=2),
        TypeError,
        "tiled_loss: output 0 of fn must be an array or None, got float.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_misuse(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match="^" + re.escape(message) + "$"):
        call()


def test_create_graph_is_refused() -> None:
    head, x, targets = make_head(), draw(2, 9, HIDDEN), labels(2, 9)
    total, _ = tiled_loss(head, x, targets, num_shards=4)
    with pytest.raises(UnsupportedError, match="create_graph must be False in backward, got True"):
        torch.autograd.grad(total, [x], create_graph=True)


def test_shard_tokens() -> None:
    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.sum()

    with torch.no_grad():
        tiled_loss(fn, draw(11, HIDDEN), tiling=Tiling(shard_tokens=4))
    assert seen[-3:] == [4, 4, 3]

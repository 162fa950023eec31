"""A weight for each token: as `reduction="none"` times the weights, at the cost of one number for all tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared_specs import LossOptions, SpecError, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.loss.costs import LossShape, loss_flop
from shared_specs.tolerances import limit
from tests.core.torch_counting import GemmFlop
from tests.loss.test_torch_ignored import OPTIONS, H, T, V, operands, plain
from tiled_torch import TiledLinearCrossEntropy, tiled_linear_cross_entropy


def weights(tokens: int = T) -> Tensor:
    """Of other sizes and signs, some of them 0."""
    found = torch.linspace(-1, 3, tokens, dtype=torch.float64)
    found[::7] = 0
    return found


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_loss_of_each_token_times_its_weight(name: str, vocab_shards: int) -> None:
    """A mean still divides by what it divides by without weights."""
    loss, tiling = OPTIONS[name], Tiling(num_shards=5, vocab_shards=vocab_shards)
    for share in (0.0, 0.5, 1.0):
        x, weight, bias, targets = operands(share)
        found: Any = tiled_linear_cross_entropy(
            x, weight, targets, bias=bias, loss=loss, tiling=tiling, token_weight=weights()
        )
        value = found.loss if loss.outputs else found
        per_token = plain(x, weight, bias, targets, replace(loss, outputs=(), reduction="none")) * weights()
        if loss.reduction != "none":
            total = plain(x, weight, bias, targets, replace(loss, outputs=(), reduction="sum"))
            whole = plain(x, weight, bias, targets, replace(loss, outputs=()))
            per_token = per_token.sum() * (whole / total).detach().nan_to_num(nan=0.0)
        pairs = [(value.sum(), per_token.sum())]
        pairs += zip(*(torch.autograd.grad(one, (x, weight, bias)) for one in pairs[0]), strict=True)
        for ours, theirs in pairs:
            assert relative_error(ours.detach().numpy(), theirs.detach().numpy()) <= limit(0.0, "float64"), share
        if loss.outputs:
            assert (found.log_probs[targets >= 0] < 0).all()  # no weight in it


def test_a_module_takes_it_with_the_call() -> None:
    x, weight, bias, targets = operands(0.5)
    module = TiledLinearCrossEntropy.from_weights(weight, bias=bias, num_shards=4)
    expected = tiled_linear_cross_entropy(x, weight, targets, bias=bias, num_shards=4, token_weight=weights())
    assert torch.equal(module(x, targets, token_weight=weights()), expected)  # type: ignore[arg-type]


def test_gradients_come_with_the_loss() -> None:
    x, weight, bias, targets = operands(0.0)
    with GemmFlop() as counter:
        tiled_linear_cross_entropy(x, weight, targets, bias=bias, num_shards=4, token_weight=weights()).backward()  # type: ignore[union-attr]
    assert counter.flop == loss_flop(LossShape(tokens=T, hidden=H, vocab=V), gradients_in_forward=True)


def test_large_weights_in_float16() -> None:
    """dlogits are held near 1: gradients of weights up to 2^30 are those of float64, rounded."""
    x, weight, _, targets = operands(0.0)
    half = [a.detach().half().requires_grad_() for a in (x, weight)]
    wide = [a.detach().double().requires_grad_() for a in half]
    scale = 2.0**30 * weights()
    for given, dtype in ((half, torch.float32), (wide, torch.float64)):
        found: Any = tiled_linear_cross_entropy(*given, targets, num_shards=4, token_weight=scale.to(dtype))
        (found * 2.0**-30).backward()
    for ours, theirs in zip(half, wide, strict=True):
        assert relative_error(ours.grad.double().numpy(), theirs.grad.numpy()) <= limit(2.0**-11, "float16")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_call_is_the_eager_one(reduction: Any) -> None:
    torch.compiler.reset()

    def run(x: Tensor, weight: Tensor, targets: Tensor, token_weight: Tensor) -> Any:
        loss = LossOptions(reduction=reduction)
        return tiled_linear_cross_entropy(x, weight, targets, loss=loss, num_shards=4, token_weight=token_weight)

    x, weight, _, targets = operands(0.5)
    found = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        value = call(x, weight, targets, weights())
        found.append((value, *torch.autograd.grad(value.sum(), (x, weight))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("token_weight", "kind", "text"),
    [
        (torch.ones(T + 1), SpecError, rf"token_weight must be \[{T}\], a number for each target, got \[{T + 1}\]"),
        (torch.ones(T, 1), SpecError, rf"token_weight must be \[{T}\], a number for each target, got \[{T}, 1\]"),
        (torch.ones(T, dtype=torch.long), SpecError, "token_weight must be .*float.*, got int64"),
        (torch.ones(T, requires_grad=True), SpecError, "token_weight requires a gradient, which a loss does not compute"),
        ([1.0] * T, TypeError, "token_weight must be an array, got list"),
    ],
)  # fmt: skip
def test_wrong_weights_are_one_message(token_weight: Any, kind: type[Exception], text: str) -> None:
    x, weight, _, targets = operands(0.0)
    with pytest.raises(kind, match=rf"^tiled_linear_cross_entropy: {text}"):
        tiled_linear_cross_entropy(x, weight, targets, token_weight=token_weight)

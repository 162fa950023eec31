"""The tiled cross entropy under torch.compile(fullgraph=True): the values and gradients of the eager call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shared_specs import LossOptions, SpecError, Tiling
from tests.asserting import assert_near
from tiled_torch import LossResult, TiledLinearCrossEntropy, tiled_linear_cross_entropy
from tiled_torch.loss import compiled
from tiled_torch.loss.call import LossCall
from tiled_torch.loss.math import Rules

OPTIONS = {
    "mean": LossOptions(),
    "none": LossOptions(reduction="none", label_smoothing=0.1),
    "outputs": LossOptions(outputs=("log_probs", "entropy", "accuracy", "prediction"), logit_softcap=3.0),
    "accuracy": LossOptions(outputs=("accuracy",), num_valid=7),
    "top_logprobs": LossOptions(outputs=("top_logprobs", "prediction"), top_k=5),
    "class_weight": LossOptions(class_weight=torch.linspace(0.5, 2, 41), z_loss=1e-3, reduction="sum"),
}


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 7, 16), (41, 16), (41,)))
    targets = torch.randint(0, 41, (3, 7))
    targets[0, :3] = -100
    return x, weight, bias, targets


WAYS = ((1, False), (3, True), (1, True), (3, False))  # parts of the vocabulary, autocast


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("name", "vocab_shards", "autocast"),
    [(name, *WAYS[at % 4]) for at, name in enumerate([*OPTIONS, *list(OPTIONS)[:1]])],
)
def test_compiled_equals_eager(name: str, vocab_shards: int, autocast: bool) -> None:
    *leaves, targets = operands()
    tiling = Tiling(num_shards=3, vocab_shards=vocab_shards)

    def run(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=OPTIONS[name], tiling=tiling)
        if not isinstance(found, LossResult):
            return 2 * found.sum()
        total = 2 * found.loss.sum() + (found.accuracy if found.accuracy is not None else 0)
        if found.prediction is not None:
            total = total + found.prediction.sum()
        if found.top_logprobs is not None:
            total = total + (found.top_logprobs.values * found.top_logprobs.indices).sum()
        return total if found.entropy is None else total + found.entropy.sum() + found.log_probs.square().sum()

    torch.compiler.reset()
    eager, compiled = run(*leaves, targets), torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves, targets)
    expected, found = (torch.autograd.grad(loss, leaves) for loss in (eager, compiled))
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch 2.14's own look
@pytest.mark.parametrize("operator", ["with_gradients_op", "values_op"])
def test_opcheck(operator: str) -> None:
    x, weight, bias, targets = operands()
    options = LossOptions(outputs=("top_logprobs",), top_k=3)
    if operator == "values_op":
        options = LossOptions(reduction="none", outputs=("entropy", "prediction"))
    static = compiled.Static.of(LossCall("test", Rules(options, 41), 4, 2, torch.float32))
    needs = ([True, True, True],) if operator == "with_gradients_op" else ()
    token_weight = torch.linspace(0, 2, targets.numel()).view(targets.shape)
    arguments = (x, weight, bias, targets, None, None, token_weight, *static, *needs)
    torch.library.opcheck(getattr(compiled, operator), arguments)


def test_bad_targets_are_refused_under_compile() -> None:
    x, weight, _, targets = operands()
    torch.compiler.reset()
    compiled = torch.compile(tiled_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(SpecError, match=r"targets must be in \[0, 41\) or ignore_index = -100, got 41"):
        compiled(x, weight, torch.full_like(targets, 41))


@pytest.mark.deep
def test_main_grad_still_receives_the_gradient() -> None:
    """A compiled graph cannot write into it, so the call runs between two graphs."""
    x, _, _, targets = operands()
    head = TiledLinearCrossEntropy(16, 41)
    head(x, targets).backward()
    expected, head.weight.grad = head.weight.grad, None
    head.weight.main_grad = torch.zeros_like(head.weight)  # type: ignore[attr-defined]
    torch.compiler.reset()
    torch.compile(head, backend="aot_eager")(x, targets).backward()
    assert_near(head.weight.main_grad, expected)
    assert head.weight.grad is None

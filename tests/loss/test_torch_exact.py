"""Exact figures of the PyTorch loss: FLOP, peak bytes, plans and budgets, the largest tensor, hooks, main_grad, drift."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs import LossOptions, Tiling
from shared_specs.core import budget as budgets
from shared_specs.core.rounding import relative_error
from shared_specs.loss import costs as loss_costs
from shared_specs.shards import plan_tokens
from shared_specs.tolerances import BF16_256_SHARDS, COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tiled_torch import backends, tiled_linear_cross_entropy

H, V = 16, 40
MEAN, SUM, NONE = (LossOptions(reduction=reduction) for reduction in ("mean", "sum", "none"))
PER_TOKEN = [NONE, *(LossOptions(outputs=(name,)) for name in ("log_probs", "lse", "entropy"))]


def head(T: int, dtype: torch.dtype = torch.float32, hidden: int = H, vocab: int = V) -> tuple[Any, Any, Any, Any]:
    """x, weight, bias (leaves) and targets, every twentieth of them ignored: too few to run the others alone."""
    torch.manual_seed(0)
    x = torch.randn(T, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden) / hidden**0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (T,))
    targets[::20] = -100
    return x, weight, bias, targets


def total(result: Any) -> Tensor:
    """One number that every differentiable part of a result contributes to."""
    parts = result if isinstance(result, tuple) else (result,)
    return torch.stack([part.sum() for part in parts if part is not None and part.requires_grad]).sum()


def error(a: Tensor, b: Tensor) -> float:
    return relative_error(a.detach().double().numpy(), b.detach().double().numpy())


def name_of(loss: LossOptions) -> str:
    return "-".join((loss.reduction, *loss.outputs))


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize("loss", [MEAN, SUM, LossOptions(outputs=("accuracy",)), *PER_TOKEN], ids=name_of)
def test_flop(loss: LossOptions, vocab_shards: int) -> None:
    """Forward, first backward and second backward."""
    x, weight, bias, targets = head(96)
    shape = loss_costs.LossShape(tokens=96, hidden=H, vocab=V, vocab_shards=vocab_shards)
    formula = partial(loss_costs.loss_flop, shape, gradients_in_forward=loss.gradients_in_forward)
    tiling = Tiling(num_shards=4, vocab_shards=vocab_shards)
    with GemmFlop() as counter:
        value = total(tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling))
        value.backward(retain_graph=True)
    assert counter.flop == formula()
    with GemmFlop() as counter:
        value.backward()
    forward = formula(dx=False, dweight=False)
    assert counter.flop == (formula() if loss.gradients_in_forward else formula() - forward)
    with GemmFlop() as counter, torch.no_grad():
        tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)
    assert counter.flop == forward


def test_flop_formulas() -> None:
    """6, 8 and 2 THV by hand."""
    shape = loss_costs.LossShape(tokens=96, hidden=H, vocab=V)
    thv = 96 * H * V
    assert loss_costs.loss_flop(shape, gradients_in_forward=True) == 6 * thv
    assert loss_costs.loss_flop(shape, gradients_in_forward=False) == 8 * thv
    cut = loss_costs.LossShape(tokens=96, hidden=H, vocab=V, vocab_shards=2)
    assert loss_costs.loss_flop(cut, gradients_in_forward=True) == 8 * thv
    assert loss_costs.loss_flop(cut, gradients_in_forward=True, dx=False, dweight=False) == 2 * thv


@pytest.mark.parametrize("loss", [MEAN, NONE], ids=["mean", "none"])
@pytest.mark.parametrize("frozen", ["x", "weight", "x weight", "x weight bias"])
def test_a_gradient_that_nobody_needs_costs_nothing(frozen: str, loss: LossOptions) -> None:
    x, weight, bias, targets = head(96)
    operands = {"x": x, "weight": weight, "bias": bias}
    for name in frozen.split():
        operands[name].requires_grad_(False)
    wanted = [operand for operand in operands.values() if operand.requires_grad]
    with GemmFlop() as counter:
        value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=4)
        assert value.requires_grad == bool(wanted)
        if wanted:
            value.sum().backward()
    shape = loss_costs.LossShape(tokens=96, hidden=H, vocab=V)
    needs: Any = {"gradients_in_forward": loss.gradients_in_forward, "dx": x.requires_grad}
    expected = loss_costs.loss_flop(shape, **needs, dweight=weight.requires_grad)
    if not x.requires_grad and not weight.requires_grad and bias.requires_grad and loss is NONE:
        expected += 2 * 96 * H * V  # the bias needs the logits again, and no other product
    assert counter.flop == expected
    assert all(operand.grad is not None for operand in wanted)


PEAKS = [
    (dtype, vocab_shards, loss, T)
    for dtype in (torch.float32, torch.bfloat16)
    for vocab_shards in (1, 4)
    for loss in (MEAN, NONE, LossOptions(outputs=("entropy",), logit_softcap=20.0))
    for T in (512, 1024)
]


@pytest.mark.parametrize(("dtype", "vocab_shards", "loss", "T"), PEAKS)
def test_peak_bytes(dtype: torch.dtype, vocab_shards: int, loss: LossOptions, T: int) -> None:
    """Within 5% of the formula, which knows no T; nothing larger than one shard of logits in float32."""
    hidden, vocab, t = 32, 8192, 256
    x, weight, _, targets = head(T, dtype, hidden, vocab)
    tiling = Tiling(shard_tokens=t, vocab_shards=vocab_shards)
    with LiveBytes() as forward:
        value = total(tiled_linear_cross_entropy(x, weight, targets, loss=loss, tiling=tiling))
    with LiveBytes() as backward:
        dx, dweight = torch.autograd.grad(value, [x, weight])
    predicted = loss_costs.loss_peak_bytes(
        loss_costs.LossShape.of(
            loss,
            tokens=T,
            hidden=hidden,
            vocab=vocab,
            vocab_shards=vocab_shards,
            itemsize=dtype.itemsize,
            weight_itemsize=dtype.itemsize,
        ),
        plan_tokens(T, shard_tokens=t),
    )
    alive = dx.numel() * dx.itemsize
    if dtype == torch.float32:  # a 16-bit gradient of the weight is made from its float32 sum after the loop
        alive += dweight.numel() * dweight.itemsize
    work, rest = (forward, backward) if loss.gradients_in_forward else (backward, forward)
    assert work.peak - alive == pytest.approx(predicted, rel=COST_BYTES)
    assert rest.peak <= (1 + COST_BYTES) * predicted
    accumulator = vocab * hidden * 4
    assert max(work.largest, rest.largest) == max(accumulator, t * (vocab // vocab_shards) * 4)


@pytest.mark.parametrize("loss", [MEAN, NONE], ids=["mean", "none"])
def test_what_is_kept_does_not_grow_with_the_vocabulary(loss: LossOptions) -> None:
    """Between forward and backward: the gradients, or a few numbers per token."""
    x, weight, _, targets = head(1024, hidden=16, vocab=2048)
    with LiveBytes() as forward:
        value = tiled_linear_cross_entropy(x, weight, targets, loss=loss, num_shards=8)
    gradients = (x.numel() + weight.numel()) * 4 if loss is MEAN else 0
    per_token = forward.now - gradients
    assert value.requires_grad
    assert 0 < per_token <= 1024 * 5 * 8


def test_automatic_plan() -> None:
    """As many shards as `plan_tokens` says, of equal length."""
    x, weight, _, targets = head(3000, vocab=256)
    with LiveBytes() as live:
        tiled_linear_cross_entropy(x, weight, targets)
    assert live.largest == 1000 * 256 * 4


@pytest.mark.parametrize("vocab_shards", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_budget_is_kept_and_used(dtype: torch.dtype, vocab_shards: int | None) -> None:
    x, weight, _, targets = head(2048, dtype, 32, 8192)
    shape = loss_costs.LossShape(
        tokens=2048,
        hidden=32,
        vocab=8192,
        vocab_shards=vocab_shards or 1,
        itemsize=dtype.itemsize,
        weight_itemsize=dtype.itemsize,
    )
    budget = 12 * 2**20
    tiling = Tiling(memory_budget=budget, vocab_shards=vocab_shards)
    with LiveBytes() as forward:
        value = tiled_linear_cross_entropy(x, weight, targets, tiling=tiling)
    dx, dweight = torch.autograd.grad(value, [x, weight])
    peak = forward.peak - dx.numel() * dx.itemsize - (dweight.numel() * 4 if dtype == torch.float32 else 0)
    t = budgets.shard_tokens_within("test", budget, 2048, partial(loss_costs.loss_peak_bytes, shape))
    assert t < 2048
    assert peak <= budget * (1 + COST_BYTES)
    assert loss_costs.loss_peak_bytes(shape, plan_tokens(2048, shard_tokens=t)) <= budget
    assert loss_costs.loss_peak_bytes(shape, plan_tokens(2048, shard_tokens=t + 1)) > budget
    assert forward.largest == max(8192 * 32 * 4, t * shape.vocab_shard * 4)


@pytest.mark.parametrize("loss", [SUM, NONE], ids=["sum", "none"])
@pytest.mark.parametrize("tiling", [Tiling(num_shards=256), Tiling(num_shards=2, vocab_shards=256)], ids=["T", "V"])
def test_bfloat16_does_not_drift_at_256_shards(tiling: Tiling, loss: LossOptions) -> None:
    """Of tokens or of the vocabulary."""
    T, hidden, vocab = (1024, 64, 256) if tiling.vocab_shards is None else (128, 64, 1024)
    x, weight, bias, targets = head(T, torch.bfloat16, hidden, vocab)
    targets = targets.clamp(min=0)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="sum")

    truth = torch.autograd.grad(
        plain(*(wide := [a.detach().double().requires_grad_() for a in (x, weight, bias)])), wide
    )
    untiled = torch.autograd.grad(plain(x, weight, bias), [x, weight, bias])
    value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)
    tiled = torch.autograd.grad(value.sum(), [x, weight, bias])
    for ours, theirs, exact in zip(tiled, untiled, truth, strict=True):
        assert error(ours, exact) <= BF16_256_SHARDS * error(theirs, exact)


@pytest.mark.parametrize("loss", [MEAN, NONE], ids=["mean", "none"])
def test_hooks_fire_once_per_parameter(loss: LossOptions) -> None:
    x, weight, bias, targets = head(64)
    fired = {"post": 0, "grad": 0}

    def post(parameter: Tensor) -> None:
        fired["post"] += 1

    def halve(grad: Tensor) -> Tensor:
        fired["grad"] += 1
        return 0.5 * grad

    def call() -> Tensor:
        return tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=8).sum()

    (expected,) = torch.autograd.grad(call(), [weight])
    for parameter in (weight, bias):
        parameter.register_post_accumulate_grad_hook(post)
    weight.register_hook(halve)
    call().backward()
    assert fired == {"post": 2, "grad": 1}
    assert torch.equal(weight.grad, 0.5 * expected)


@pytest.mark.parametrize("loss", [MEAN, NONE], ids=["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flagged", [True, False])
def test_main_grad_takes_the_gradient(flagged: bool, dtype: torch.dtype, loss: LossOptions) -> None:
    """Added in float32 to main_grad, scaled by the upstream gradient; `.grad` untouched or a placeholder."""
    x, weight, bias, targets = head(64, dtype)
    wide = [a.detach().double().requires_grad_() for a in (weight, bias)]
    logits = F.linear(x.detach().double(), *wide)
    reduction = loss.reduction
    expected = torch.autograd.grad(F.cross_entropy(logits, targets, reduction=reduction).sum(), wide)
    for parameter in (weight, bias):
        parameter.main_grad = torch.ones(parameter.shape)
        if flagged:
            parameter.grad_added_to_main_grad = False
    for _ in range(2):
        value = 3 * tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=4).sum()
        value.backward(retain_graph=True)
        value.backward()
    assert x.grad is not None
    for parameter, grad in zip((weight, bias), expected, strict=True):
        baseline = torch.finfo(dtype).eps
        allowed = limit(baseline, "float32" if dtype == torch.float32 else "bfloat16")
        assert error(parameter.main_grad - 1, 12 * grad) <= allowed
        if flagged:
            assert parameter.grad_added_to_main_grad
            assert parameter.grad.shape == parameter.shape
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("loss", [MEAN, NONE], ids=["mean", "none"])
def test_main_grad_of_16_bits_is_rounded_once(loss: LossOptions) -> None:
    """What a float32 main_grad gets, added to what was there and rounded there once."""
    x, weight, bias, targets = head(64, torch.bfloat16)
    found = {}
    for dtype, before in ((torch.float32, 0.0), (torch.bfloat16, 3.0)):
        for parameter in (weight, bias):
            parameter.main_grad = torch.full(parameter.shape, before, dtype=dtype)
        tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=16).sum().backward()
        found[dtype] = [weight.main_grad, bias.main_grad]
    for wide, narrow in zip(*found.values(), strict=True):
        assert torch.equal(narrow, (wide + 3).bfloat16())


@pytest.mark.parametrize("first", [SUM, NONE], ids=["sum", "none"])
def test_two_losses_on_one_weight_add_up(first: LossOptions) -> None:
    """Two heads on the same weight, x and bias, in one backward."""
    x, weight, bias, targets = (a.detach() for a in head(48, torch.float64))
    others = targets.roll(1)
    leaves = [a.requires_grad_() for a in (x, weight, bias)]

    def call(targets: Tensor, loss: LossOptions) -> Tensor:
        return tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()

    (0.25 * call(targets, first) + 3 * call(others, MEAN)).backward()
    logits = F.linear(x, weight, bias)
    plain = 0.25 * F.cross_entropy(logits, targets, reduction="sum") + 3 * F.cross_entropy(logits, others)
    for leaf, grad in zip(leaves, torch.autograd.grad(plain, leaves), strict=True):
        assert error(leaf.grad, grad) <= DISTRIBUTED_FLOAT64


def test_backend_that_ran() -> None:
    x, weight, _, targets = head(8)
    for backend in ("auto", "eager"):
        backends.record_run("tiled_linear_cross_entropy", "nothing")
        tiled_linear_cross_entropy(x, weight, targets, backend=backend)
        assert backends.last_run("tiled_linear_cross_entropy") == "eager"

"""What the distillation loss of PyTorch costs and refuses, and that it behaves as any differentiable function does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs import LossOptions, SpecError, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.distillation.costs import (
    DistillationShape,
    distillation_flop,
    distillation_peak_bytes,
    plan_distillation,
)
from shared_specs.tolerances import COST_BYTES, between, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tiled_torch import Tiling, tiled_distillation_loss
from tiled_torch.distillation.math import log_softmax_

T, H, G, V = 120, 12, 20, 30


def operands(share: float = 0.5, dtype: torch.dtype = torch.float64, sizes: Any = (T, H, G, V)) -> Any:
    """Student, its weight (leaves), teacher, its weight, and targets of which this share is ignored."""
    tokens, hidden, teacher_hidden, vocab = sizes
    draw = torch.Generator().manual_seed(0)
    shapes = (tokens, hidden), (vocab, hidden), (tokens, teacher_hidden), (vocab, teacher_hidden)
    student, w, teacher, w_teacher = (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)
    targets = torch.randint(vocab, (tokens,), generator=draw)
    targets[torch.randperm(tokens, generator=draw)[: round(share * tokens)]] = -100
    return student.requires_grad_(), w.requires_grad_(), teacher, w_teacher, targets


def near(actual: Tensor, expected: Tensor) -> None:
    assert relative_error(actual.detach().numpy(), expected.detach().numpy()) <= limit(0.0, "float64")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_flop_are_three_units_of_the_student_and_one_of_the_teacher(share: float, reduction: Any, frozen: bool) -> None:
    """Of the tokens that count; a frozen head spares its gradient's. Without gradients one of each."""
    student, w, *rest = operands(share)
    w.requires_grad_(not frozen)
    loss, valid = LossOptions(reduction=reduction), round(T * (1 - share))
    with GemmFlop() as counter:
        tiled_distillation_loss(student, w, *rest, loss=loss, num_shards=4).sum().backward()
    shape = DistillationShape(tokens=T, hidden=H, teacher_hidden=G, vocab=V)
    expected = distillation_flop(shape, gradients_in_forward=reduction == "mean", valid=1 - share)
    assert counter.flop == expected - frozen * 2 * valid * H * V
    with GemmFlop() as counter, torch.no_grad():
        tiled_distillation_loss(student, w, *rest, loss=loss, num_shards=4)
    assert counter.flop == 2 * valid * V * (H + G)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_peak_bytes_are_one_pair_of_logits_whatever_the_tokens(kind: Any, dtype: torch.dtype) -> None:
    """And a few rows of elementwise work: four times the tokens take no more."""
    t, hidden, teacher_hidden, vocab = 256, 32, 48, 4096
    peaks = []
    for tokens in (t, 4 * t):
        student, w, teacher, w_teacher, targets = operands(0.0, dtype, (tokens, hidden, teacher_hidden, vocab))
        arguments = {"kind": kind, "weight_hard": 0.5, "temperature": 2.0, "tiling": Tiling(shard_tokens=t)}
        with LiveBytes() as live:
            value = tiled_distillation_loss(student, w, teacher, w_teacher, targets, **arguments)  # type: ignore[arg-type]
        kept = student.nbytes + w.numel() * 4
        shape = DistillationShape(
            tokens=tokens,
            hidden=hidden,
            teacher_hidden=teacher_hidden,
            vocab=vocab,
            itemsize=dtype.itemsize,
            teacher_itemsize=dtype.itemsize,
            weight_itemsize=dtype.itemsize,
            teacher_weight_itemsize=dtype.itemsize,
        )
        sums = 4 * w.numel() if dtype != torch.float32 else 0  # in the formula, and in what is kept
        plan = plan_distillation("", shape, shard_tokens=t)
        of_tokens = tokens * 8 * 8  # labels, weights and losses of every token
        most = distillation_peak_bytes(shape, plan) - sums + of_tokens
        assert live.peak - kept <= (1 + COST_BYTES) * most
        peaks.append(live.peak - kept - of_tokens)
        del value
    assert peaks[1] <= peaks[0] * (1 + COST_BYTES)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_taken_out_take_no_more_bytes_than_all_rows(dtype: torch.dtype) -> None:
    """Their hidden states and gradient are copies; shards of them are shorter by as much."""
    peaks = []
    for ignored in (0.0, 0.1, 0.5):
        student, w, teacher, w_teacher, targets = operands(ignored, dtype, (2048, 384, 512, 1024))
        with LiveBytes() as live:
            value = tiled_distillation_loss(student, w, teacher, w_teacher, targets, tiling=Tiling(shard_tokens=512))
        peaks.append(live.peak)
        del value
    assert max(peaks[1:]) <= peaks[0]


def test_no_result_is_changed_by_tokens_that_do_not_count() -> None:
    """Ignored rows have no loss and no gradient, whether they are run or not; without a target every one counts."""
    for share in (0.03, 0.5):
        student, w, teacher, w_teacher, targets = operands(share)
        valid = targets != -100
        found = tiled_distillation_loss(student, w, teacher, w_teacher, targets, num_shards=5)
        alone = tiled_distillation_loss(student[valid], w, teacher[valid], w_teacher, num_shards=2)
        near(found, alone)
        pairs = zip(torch.autograd.grad(found, [student, w]), torch.autograd.grad(alone, [student, w]), strict=True)
        for ours, theirs in pairs:
            near(ours, theirs)


def test_entries_that_cannot_be_add_nothing() -> None:
    """Masked entries have -inf as bias, in one head or in both, as their distributions without them."""
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        student, w, teacher, w_teacher, _ = operands()
        mask = torch.where(torch.arange(V) < V - 7, 0.0, -torch.inf).double()
        arguments: Any = {"kind": kind, "num_shards": 3}
        found = tiled_distillation_loss(
            student, w, teacher, w_teacher, bias_student=mask, bias_teacher=mask, **arguments
        )
        cut = tiled_distillation_loss(student, w[: V - 7], teacher, w_teacher[: V - 7], **arguments)
        near(found, cut)
        for ours, theirs in zip(
            torch.autograd.grad(found, [student, w]), torch.autograd.grad(cut, [student, w]), strict=True
        ):
            near(ours, theirs)
    masked = tiled_distillation_loss(student, w, teacher, w_teacher, bias_teacher=mask, num_shards=3)
    p = F.linear(teacher, w_teacher, mask).softmax(1)
    log_q = F.linear(student, w).log_softmax(1)
    near(masked, (torch.special.xlogy(p, p) - p * log_q).sum(1).mean())


def test_a_student_that_is_its_teacher_has_no_loss() -> None:
    student, w, *_ = operands()
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        arguments: Any = {"kind": kind, "temperature": 3.0}
        value = tiled_distillation_loss(student, w, student.detach(), w.detach(), **arguments)
        assert abs(value.item()) <= limit(0.0, "float64")
        assert not any(a.abs().max() > limit(0.0, "float64") for a in torch.autograd.grad(value, [student, w]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_second_backward_gives_the_same(reduction: Any) -> None:
    student, w, *rest = operands()
    value = tiled_distillation_loss(student, w, *rest, loss=LossOptions(reduction=reduction), num_shards=3).sum()
    first = torch.autograd.grad(value, [student, w], retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(2 * value, [student, w]), first, strict=True):
        near(ours, 2 * theirs)
    again = tiled_distillation_loss(student, w, *rest, loss=LossOptions(reduction=reduction)).sum()
    with pytest.raises(UnsupportedError, match="create_graph must be False in backward"):
        torch.autograd.grad(again, student, create_graph=True)


def test_a_teacher_of_another_dtype_and_autocast() -> None:
    """A bfloat16 teacher beside a float32 student; under autocast both heads are products in bfloat16."""
    student, w, teacher, w_teacher, targets = operands(0.5, torch.float32)
    rounded = teacher.bfloat16(), w_teacher.bfloat16()
    mixed = tiled_distillation_loss(student, w, *rounded, targets, num_shards=3)
    wide = tiled_distillation_loss(student, w, *(each.float() for each in rounded), targets, num_shards=3)
    assert relative_error(mixed.detach().numpy(), wide.detach().numpy()) <= limit(0.0, "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        found = tiled_distillation_loss(student, w, teacher, w_teacher, targets, num_shards=3)
    low = [each.detach().bfloat16().requires_grad_() for each in (student, w)]
    expected = tiled_distillation_loss(*low, *rounded, targets, num_shards=3)
    assert torch.equal(found, expected)
    grads = torch.autograd.grad(found, [student, w])
    assert [each.dtype for each in grads] == [torch.float32] * 2
    for ours, theirs in zip(grads, torch.autograd.grad(expected, low), strict=True):
        assert relative_error(ours.numpy(), theirs.float().numpy()) <= between("bfloat16")


def test_a_gradient_goes_to_main_grad_where_there_is_one() -> None:
    student, w, *rest = operands()
    (expected,) = torch.autograd.grad(tiled_distillation_loss(student, w, *rest), w)
    w.main_grad = torch.ones_like(w)
    tiled_distillation_loss(student, w, *rest).backward()
    assert w.grad is None
    near(w.main_grad - 1, expected)


@pytest.mark.deep
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_step_is_the_eager_one(reduction: Any) -> None:
    """One operator of one graph, which looks at the labels when it runs."""
    torch.compiler.reset()
    student, w, *rest = operands()
    arguments: Any = {"kind": "jsd", "beta": 0.3, "weight_hard": 0.2, "num_shards": 3}
    loss, teacher = LossOptions(reduction=reduction, logit_softcap=5.0), LossOptions(logit_scale=0.5)

    def step(student: Tensor, w: Tensor) -> Tensor:
        return tiled_distillation_loss(student * 2, w, *rest, loss=loss, loss_teacher=teacher, **arguments) * 3

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found, expected = compiled(student, w), step(student, w)
    near(found, expected)
    upstream = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    for ours, theirs in zip(
        *(torch.autograd.grad(each, [student, w], upstream) for each in (found, expected)), strict=True
    ):
        near(ours, theirs)
    with torch.no_grad():
        near(compiled(student, w), expected)


def test_what_would_need_a_gradient_is_refused() -> None:
    student, w, teacher, w_teacher, targets = operands()
    with pytest.raises(SpecError, match="w_teacher requires a gradient, which this loss does not compute"):
        tiled_distillation_loss(student, w, teacher, w_teacher.requires_grad_(), targets)
    with torch.no_grad():
        tiled_distillation_loss(student, w, teacher, w_teacher, targets)
    weight = torch.ones(T, requires_grad=True)
    with pytest.raises(SpecError, match="token_weight requires a gradient"):
        tiled_distillation_loss(student, w, teacher, w_teacher.detach(), targets, token_weight=weight)
    loss = LossOptions(num_valid=torch.tensor(-1))
    with pytest.raises(SpecError, match=r"loss\.num_valid must be > 0, got -1"):
        tiled_distillation_loss(student, w, teacher, w_teacher.detach(), targets, loss=loss)
    with pytest.raises(UnsupportedError, match=r"this call is inside torch\.func"):
        torch.func.grad(lambda x: tiled_distillation_loss(x, w.detach(), teacher, w_teacher.detach()))(student.detach())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_large_logits_round_what_is_small_alone(temperature: float) -> None:
    """A log of a sum of exponentials as large as the logits would be rounded to two hundred times as much."""
    z = torch.linspace(1000, 1003, V, dtype=torch.float32)[None]
    expected = torch.log_softmax(z.double() / temperature, 1)
    found = log_softmax_(z.clone(), temperature)
    assert relative_error(found.numpy(), expected.numpy()) <= limit(0.0, "float32")

"""Rows whose label is ignored are never multiplied: what a loss costs is what counts, and its values are the plain ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.loss.costs import LossShape, loss_flop, loss_peak_bytes, runs_alone
from shared_specs.shards import plan_tokens
from shared_specs.tolerances import COST_BYTES, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tiled_torch import tiled_linear_cross_entropy
from tiled_torch.loss.loops import Head

T, H, V = 120, 12, 30
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


def operands(share: float, dtype: torch.dtype = torch.float64, tokens: int = T, hidden: int = H, vocab: int = V) -> Any:
    """x, weight, bias (leaves), and targets of which this share, drawn among the rows, is ignored."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((tokens, hidden), (vocab, hidden), (vocab,))
    )
    targets = torch.randint(vocab, (tokens,), generator=draw)
    targets[torch.randperm(tokens, generator=draw)[: round(share * tokens)]] = -100
    return x, weight, bias, targets


def plain(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, loss: LossOptions) -> Tensor:
    """The loss of whole logits; a mean of nothing is 0."""
    logits = loss.logit_scale * F.linear(x, weight, bias)
    if loss.logit_softcap is not None:
        logits = loss.logit_softcap * torch.tanh(logits / loss.logit_softcap)
    counted = targets != loss.ignore_index
    own: Any = loss.class_weight
    per_token = F.cross_entropy(logits, targets, own, label_smoothing=loss.label_smoothing, reduction="none")
    per_token = per_token + loss.z_loss * counted.double() * logits.logsumexp(1).square()
    if loss.reduction == "none":
        return per_token
    weights = counted if own is None else torch.where(counted, own[targets.clamp(min=0)], 0.0)
    count = weights.sum() if loss.num_valid is None else loss.num_valid
    return per_token.sum() / (1 if loss.reduction == "sum" or not counted.any() else count)


OPTIONS: dict[str, LossOptions] = {
    "mean": LossOptions(),
    "sum": LossOptions(reduction="sum"),
    "none": LossOptions(reduction="none"),
    "smoothing and z": LossOptions(label_smoothing=0.2, z_loss=0.1),
    "bent": LossOptions(logit_scale=0.7, logit_softcap=3.0, reduction="none"),
    "class weights": LossOptions(class_weight=torch.linspace(0.5, 2, V, dtype=torch.float64), label_smoothing=0.1),
    "num_valid": LossOptions(num_valid=77),
    "log_probs": LossOptions(outputs=("log_probs", "accuracy")),
}


def value_of(found: Any) -> Tensor:
    """A number that depends on every result with a gradient, on those of ignored rows too."""
    parts = [found] if isinstance(found, Tensor) else [found.loss, found.log_probs]
    return sum((part * torch.linspace(1, 2, part.numel(), dtype=part.dtype).view(part.shape)).sum() for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_whole_logits(name: str, vocab_shards: int) -> None:
    for share in SHARES:
        x, weight, bias, targets = operands(share)
        loss, tiling = OPTIONS[name], Tiling(num_shards=5, vocab_shards=vocab_shards)
        found: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)
        expected: Any = plain(x, weight, bias, targets, replace(loss, outputs=()))
        if loss.outputs:
            log_p = F.linear(x, weight, bias).log_softmax(1)
            log_probs = torch.where(targets < 0, 0.0, log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0])
            expected = type(found)(expected, log_probs=log_probs)
            right = (log_p.argmax(1) == targets).sum(dtype=torch.float64) / max(1, int((targets >= 0).sum()))
            assert relative_error(found.accuracy.numpy(), right.numpy()) <= limit(0.0, "float64")
        pairs = [(value_of(found), value_of(expected))]
        pairs += zip(*(torch.autograd.grad(value, (x, weight, bias)) for value in pairs[0]), strict=True)
        for ours, theirs in pairs:
            assert relative_error(ours.detach().numpy(), theirs.detach().numpy()) <= limit(0.0, "float64"), share


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9, 1.0])
def test_flop_are_those_of_the_rows_that_count(share: float, reduction: Any) -> None:
    """At most 0.31 units of 2 THV where 90 % are ignored; below a sixteenth all rows are run."""
    x, weight, bias, targets = operands(share)
    loss, valid = LossOptions(reduction=reduction), int((targets >= 0).sum())
    with GemmFlop() as counter:
        tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=4).sum().backward()  # type: ignore[union-attr]
    assert runs_alone(T, valid) == (share > 0.02)
    shape = LossShape(tokens=valid if runs_alone(T, valid) else T, hidden=H, vocab=V)
    assert counter.flop == loss_flop(shape, gradients_in_forward=reduction == "mean")
    if share == 0.9 and reduction == "mean":
        assert counter.flop <= 0.31 * 2 * T * H * V
    assert not x.grad[targets < 0].any()


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_shards", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_peak_bytes_are_no_more_than_those_of_all_rows(share: float, vocab_shards: int, dtype: torch.dtype) -> None:
    """The copies of a shard of x and of dx have their room: a shard has fewer tokens."""
    tokens, hidden, vocab, t = 1024, 256, 4096, 256
    x, weight, _, targets = operands(share, dtype, tokens, hidden, vocab)
    for reduction in ("mean", "none"):
        loss, tiling = LossOptions(reduction=reduction), Tiling(shard_tokens=t, vocab_shards=vocab_shards)  # type: ignore[arg-type]
        with LiveBytes() as forward:
            value = tiled_linear_cross_entropy(x, weight, targets, loss=loss, tiling=tiling).sum()  # type: ignore[union-attr]
        with LiveBytes() as backward:
            torch.autograd.grad(value, [x, weight])
        sizes = {"itemsize": dtype.itemsize, "weight_itemsize": dtype.itemsize, "vocab_shards": vocab_shards}
        shape = LossShape(tokens=tokens, hidden=hidden, vocab=vocab, **sizes)
        work = forward if reduction == "mean" else backward
        alive = x.numel() * x.itemsize + (weight.numel() * 4 if dtype == torch.float32 else 0)
        most = loss_peak_bytes(shape, plan_tokens(tokens, shard_tokens=t))
        assert work.peak - alive <= (1 + COST_BYTES) * most


class Reads(TorchDispatchMode):
    """How often the device is waited for, for a number of rows or a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("name", ["mean", "none", "log_probs"])
def test_one_read_of_the_device_in_forward_and_backward(name: str, share: float) -> None:
    """Besides the check of the targets, which a CPU alone makes."""
    x, weight, _, targets = operands(share)
    with Reads() as reads:
        value = value_of(tiled_linear_cross_entropy(x, weight, targets, loss=OPTIONS[name], num_shards=3))
        in_forward = reads.count
        value.backward()
    checked = in_forward - 1
    assert checked <= 1
    assert reads.count - in_forward <= (0 if name == "mean" else 1)  # the check again, of logits that are made again


def test_a_result_of_ignored_rows_runs_them() -> None:
    """`lse` and `entropy` have values at ignored labels too."""
    x, weight, _, targets = operands(0.5)
    found: Any = tiled_linear_cross_entropy(
        x, weight, targets, loss=LossOptions(outputs=("lse", "entropy")), num_shards=3
    )
    p = F.linear(x, weight).softmax(1)
    assert relative_error(found.lse.detach().numpy(), F.linear(x, weight).logsumexp(1).detach().numpy()) <= limit(
        0, "float64"
    )
    expected = -(p * p.log()).sum(1)
    assert relative_error(found.entropy.detach().numpy(), expected.detach().numpy()) <= limit(0, "float64")


def test_fake_tensors_run_all_rows() -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(*shape, requires_grad=True) for shape in ((T, H), (V, H)))
        with GemmFlop() as counter:
            targets = torch.empty(T, dtype=torch.long)
            tiled_linear_cross_entropy(x, weight, targets, num_shards=4).backward()  # type: ignore[union-attr]
    assert counter.flop == loss_flop(LossShape(tokens=T, hidden=H, vocab=V), gradients_in_forward=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_calls_run_the_rows_that_count_too(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is one operator of a graph, which looks at the labels when it runs; no other number of them compiles anew."""
    torch.compiler.reset()
    programs, rows, logits = [], [], Head.logits

    def backend(graph: Any, inputs: Any) -> Any:
        programs.append(graph)
        return graph

    def counted(head: Head, x: Tensor, *args: Any) -> Tensor:
        rows.append(x.shape[0])
        return logits(head, x, *args)

    def run(x: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(reduction=reduction), num_shards=4)

    monkeypatch.setattr(Head, "logits", counted)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for share in (0.9, 0.5):
        x, weight, _, targets = operands(share)
        rows.clear()
        found = compiled(x, weight, targets).sum()
        ours = torch.autograd.grad(found, (x, weight))
        assert sum(rows) == int((targets >= 0).sum()) * (1 if reduction == "mean" else 2)
        value = run(x, weight, targets).sum()
        for a, b in zip((found, *ours), (value, *torch.autograd.grad(value, (x, weight))), strict=True):
            assert torch.equal(a, b)
    assert len(programs) == 1

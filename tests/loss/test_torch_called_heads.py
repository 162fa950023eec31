"""The loss of a head that is called, since it is more than a weight and a bias: of the rows whose label counts alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.loss.costs import runs_alone
from shared_specs.tolerances import limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.loss.ranks_torch_sequence_loss import Waits
from tiled_torch.models.causal_lm import loss_through
from tiled_torch.tile.call import PROBE_TOKENS

T, H, V, RANK = 48, 8, 20, 2
SHARES = (0.0, 0.02, 0.1, 0.5, 0.9, 1.0)


class Adapted(nn.Module):
    """A linear head and a low-rank one beside it, which notes of how many rows it is called."""

    def __init__(self, hidden: int = H, vocab: int = V, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"base": (hidden, vocab), "a": (hidden, RANK), "b": (RANK, vocab)}
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False, dtype=dtype))
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[:-1].numel())
        return self.base(x) + self.b(self.a(x))


def operands(share: float, tokens: int = T, hidden: int = H, vocab: int = V, dtype: Any = torch.float64) -> Any:
    """Hidden states [3, tokens / 3, H], and targets of which this share is ignored."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, tokens // 3, hidden, generator=draw, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (3, tokens // 3), generator=draw)
    targets.view(-1)[torch.randperm(tokens, generator=draw)[: round(share * tokens)]] = -100
    return x, targets


def run(head: nn.Module, x: Tensor, targets: Tensor, loss: LossOptions, **options: Any) -> list[Tensor]:
    """The loss and the gradients of x and of every parameter."""
    value = loss_through(head, x, targets, loss, Tiling(num_shards=4), "auto", **options)
    return [value.detach(), *torch.autograd.grad(value, (x, *head.parameters()))]


OPTIONS: dict[str, LossOptions] = {
    "mean": LossOptions(),
    "sum": LossOptions(reduction="sum"),
    "num_valid": LossOptions(num_valid=77),
    "smoothing, class weights": LossOptions(
        class_weight=torch.linspace(0.5, 2, V, dtype=torch.float64), label_smoothing=0.2
    ),
    "bent": LossOptions(logit_scale=0.7, logit_softcap=3.0),
}


@pytest.mark.parametrize("finish", [None, torch.tanh], ids=["head", "more than a head"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_whole_logits(name: str, finish: Any) -> None:
    head, loss = Adapted(), OPTIONS[name]
    for share in SHARES:
        if share == 1 and loss.class_weight is not None:
            continue  # 0 / 0, as of whole logits
        x, targets = operands(share)
        found = run(head, x, targets, loss, finish=finish)
        logits = head(x)
        if finish is not None:
            logits = finish(logits)
        elif loss.logit_softcap is not None:
            logits = loss.logit_softcap * torch.tanh(loss.logit_scale * logits / loss.logit_softcap)
        rules = {"weight": loss.class_weight, "label_smoothing": loss.label_smoothing}
        value = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", **rules)  # type: ignore[arg-type]
        counted = targets >= 0
        heaviness = counted if loss.class_weight is None else loss.class_weight[targets[counted]]  # type: ignore[index]
        count = heaviness.sum().clamp(min=1) if loss.num_valid is None else loss.num_valid
        value = value / (1 if loss.reduction == "sum" else count)
        expected = [value.detach(), *torch.autograd.grad(value, (x, *head.parameters()))]
        for ours, theirs in zip(found, expected, strict=True):
            assert relative_error(ours.numpy(), theirs.numpy()) <= limit(0.0, "float64"), share
        assert not found[1][~counted].any()


@pytest.mark.parametrize("share", SHARES)
def test_flop_are_those_of_the_rows_that_count(share: float) -> None:
    """Logits twice, dx and dweight: 8 THV of the head times the share; below a sixteenth all rows are run. Of no label one row
    is, so that every parameter has its gradient.
    """
    head, (x, targets) = Adapted(), operands(share)
    valid = int((targets >= 0).sum())
    rows = max(1, valid) if runs_alone(T, valid) else T
    with GemmFlop() as counter, Waits() as waits:
        run(head, x, targets, LossOptions())
    assert sum(head.rows) == PROBE_TOKENS + 2 * rows
    of_row = 2 * (H * V + H * RANK + RANK * V)
    assert counter.flop == (4 * rows + PROBE_TOKENS) * of_row
    assert waits.count <= 1  # for how many count


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_peak_bytes_are_those_of_all_rows_and_a_copy_of_a_shard(share: float) -> None:
    tokens, hidden, vocab = 768, 64, 1024
    head, found = Adapted(hidden, vocab, torch.float32), {}
    for each in (0.0, share):
        x, targets = operands(each, tokens, hidden, vocab, torch.float32)
        with LiveBytes() as live:
            run(head, x, targets, LossOptions())
        found[each] = live.peak
    assert found[share] <= found[0.0] + tokens // 4 * hidden * 4 + 2 * tokens * 8


def test_fake_tensors_run_all_rows() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        head, (x, targets) = Adapted(), operands(0.5)
        head.rows.clear()
        run(head, x, targets, LossOptions())
    assert sum(head.rows) == PROBE_TOKENS + 2 * T

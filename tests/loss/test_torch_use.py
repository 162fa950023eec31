"""The PyTorch loss as it is used: targets that do not exist, counts of others, and the module."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shared_specs import LossOptions, SpecError, Tiling
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_near
from tests.core.torch_counting import GemmFlop
from tests.loss.test_torch_autograd import NONE, OUTPUTS, REDUCED, SUM, assert_same, error, leaves_of, plain
from tests.loss.test_torch_exact import head
from tiled_torch import TiledLinearCrossEntropy, tiled_linear_cross_entropy
from tiled_torch.loss import math as loss_math


@pytest.mark.parametrize("bad", [41, -1, 10**9])
@REDUCED
def test_a_missing_target_is_an_error_before_any_work(loss: LossOptions, bad: int) -> None:
    x, weight, _, targets = head(16)
    weight.grad = torch.ones_like(weight)
    targets[3] = bad
    with (
        GemmFlop() as counter,
        pytest.raises(SpecError, match=f"targets must be in .0, 40. or ignore_index.*got {bad}"),
    ):
        tiled_linear_cross_entropy(x, weight, targets, loss=loss).sum().backward()
    assert counter.flop == 0
    assert x.grad is None
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize(
    "loss", [SUM, NONE, LossOptions(reduction="none", outputs=OUTPUTS)], ids=["sum", "none", "outputs"]
)
@pytest.mark.parametrize("bad", [40, -1, 10**9])
def test_a_missing_target_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, bad: int, loss: LossOptions, vocab_shards: int
) -> None:
    """On a device: NaN in the token's loss and in its row of dx, every other row right, nothing read out of bounds."""
    x, weight, bias, targets = leaves_of()
    loss_of_others = plain(x, weight, targets, bias, "none")
    expected = torch.autograd.grad(loss_of_others.sum(), [x])[0]
    targets[5] = bad
    others = torch.arange(24) != 5
    monkeypatch.setattr(loss_math, "first_missing_target", lambda *_: None)
    tiling = Tiling(num_shards=5, vocab_shards=vocab_shards)
    result: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)
    value = result.loss if loss.outputs else result
    dx, dweight, dbias = torch.autograd.grad(value.sum(), [x, weight, bias])
    if loss.reduction == "none":
        assert value.isnan().tolist() == [token == 5 for token in range(24)]
        assert error(value[others], loss_of_others[others]) <= DISTRIBUTED_FLOAT64
    else:
        assert value.isnan()
    assert dx[5].isnan().all()
    assert error(dx[others], expected[others]) <= DISTRIBUTED_FLOAT64
    assert dweight.isnan().all()
    assert dbias.isnan().all()


def test_labels_stay_inside_the_vocabulary() -> None:
    targets = torch.tensor([0, 39, 40, -1, -100, 2**40])
    labels = loss_math.make_labels(loss_math.Rules(LossOptions(), 40), targets, torch.full((40,), 2.0), torch.float32)
    assert labels.target.tolist() == [0, 39, 0, 0, 0, 0]
    assert labels.counted.isnan().tolist() == [False, False, True, True, False, True]
    assert labels.counted[[0, 1, 4]].tolist() == [1.0, 1.0, 0.0]
    assert labels.weight[[0, 1, 4]].tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize("num_valid", [None, torch.tensor(0), torch.tensor(0.0)], ids=["counted", "0", "0.0"])
def test_a_mean_of_nothing_is_zero(num_valid: Any) -> None:
    """Also where the count of all ranks came out as zero."""
    x, weight, bias, _ = leaves_of()
    loss = LossOptions(num_valid=num_valid, outputs=("accuracy",))
    targets = torch.full((24,), -100)
    result: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5)
    assert (result.loss.item(), result.accuracy.item()) == (0.0, 0.0)
    for grad in torch.autograd.grad(result.loss, [x, weight, bias]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_gradient_accumulation_with_a_global_count() -> None:
    """Micro-batches of different lengths and counts add up to the mean over everything."""
    x, weight, bias, targets = leaves_of(40)
    targets[:9] = -100
    expected = torch.autograd.grad(plain(x, weight, targets, bias), [x, weight, bias])
    valid = (targets != -100).sum()
    head = TiledLinearCrossEntropy.from_weights(weight.detach(), bias=bias.detach(), num_shards=3)
    values = []
    for part in (slice(0, 10), slice(10, 37), slice(37, 40)):
        values.append(head(x[part], targets[part], num_valid=valid))
        values[-1].backward()
    assert error(torch.stack(values).sum(), plain(x, weight, targets, bias)) <= DISTRIBUTED_FLOAT64
    assert_same([x.grad, head.weight.grad, head.bias.grad], expected)


def test_an_argument_that_would_lose_its_gradient_is_refused() -> None:
    x, weight, _, targets = head(8)
    for name, value in (("class_weight", torch.ones(40)), ("num_valid", torch.tensor(8.0))):
        loss = LossOptions(**{name: value.requires_grad_()})
        message = (
            f"^tiled_linear_cross_entropy: loss.{name} requires a gradient, which a loss does not compute. Detach it.$"
        )
        with pytest.raises(SpecError, match=message):
            tiled_linear_cross_entropy(x, weight, targets, loss=loss)


def test_module_is_a_linear_head() -> None:
    """The same parameters by name, drawn the same way, and the same loss."""
    for bias in (True, False):
        torch.manual_seed(0)
        linear = nn.Linear(16, 40, bias=bias)
        torch.manual_seed(0)
        head = TiledLinearCrossEntropy(16, 40, bias=bias, num_shards=3)
        assert list(head.state_dict()) == list(linear.state_dict())
        for ours, theirs in zip(head.parameters(), linear.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        head.load_state_dict(linear.state_dict())
        x, targets = torch.randn(2, 5, 16), torch.randint(40, (2, 5))
        expected = plain(x, linear.weight, targets, linear.bias)
        assert_near(head(x, targets), expected)


def test_module_adopts_weights() -> None:
    linear, raw = nn.Linear(16, 40), torch.randn(40, 16)
    head = TiledLinearCrossEntropy.from_weights(linear.weight, bias=linear.bias)
    assert (head.weight is linear.weight, head.bias is linear.bias) == (True, True)
    head = TiledLinearCrossEntropy.from_weights(raw)
    assert isinstance(head.weight, nn.Parameter)
    assert (head.weight.data_ptr(), head.bias) == (raw.data_ptr(), None)


def test_module_num_valid_of_a_call_replaces_the_option() -> None:
    head = TiledLinearCrossEntropy(16, 40, loss=LossOptions(num_valid=4), dtype=torch.float64)
    x, targets = torch.randn(6, 16, dtype=torch.float64), torch.randint(40, (6,))
    for given, divisor in ((None, 4), (3, 3), (torch.tensor(12), 12)):
        found = head(x, targets, num_valid=given) * divisor
        assert error(found, plain(x, head.weight, targets, reduction="sum")) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("again", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_module_copies(again: Any) -> None:
    head = TiledLinearCrossEntropy(16, 40, bias=True, loss=LossOptions(z_loss=0.1), num_shards=3)
    twin = again(head)
    x, targets = torch.randn(6, 16), torch.randint(40, (6,))
    assert torch.equal(twin(x, targets), head(x, targets))
    assert twin.weight is not head.weight
    assert repr(twin) == repr(head)


def test_module_says_what_it_is() -> None:
    head = TiledLinearCrossEntropy(16, 40, loss=LossOptions(z_loss=0.25), num_shards=3)
    text = repr(head)
    assert text.startswith("TiledLinearCrossEntropy(hidden_size=16, vocab_size=40, LossOptions(")
    for part in ("z_loss=0.25", "num_shards=3", "backend=auto"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"vocab_size": 0}, "TiledLinearCrossEntropy: vocab_size must be >= 1, got 0."),
        ({"loss": LossOptions(z_loss=-1)}, "TiledLinearCrossEntropy: loss.z_loss must be >= 0, got -1."),
        (
            {"tiling": Tiling(keep=0.5)},
            "TiledLinearCrossEntropy: keep must be left out, got 0.5. This function has no use for it.",
        ),
        (
            {"num_shards": 0},
            "TiledLinearCrossEntropy: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose.",
        ),
    ],
    ids=["size", "loss", "keep", "shards"],
)
def test_module_refuses_bad_options(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        TiledLinearCrossEntropy(**{"hidden_size": 16, "vocab_size": 40, **arguments})
    assert str(caught.value) == text

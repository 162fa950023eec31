"""Losses of fake tensors, which have shapes and no values: a simulation of a model at its real size reads no target."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shared_specs.config import LossOptions
from tiled_torch import SpecError, tiled_linear_cross_entropy, tiled_loss


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(2, 9, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    return x, weight, torch.randint(0, 13, (2, 9))


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"outputs": ("log_probs", "lse", "entropy", "accuracy", "prediction")},
        {"outputs": ("top_logprobs",), "top_k": 3},
        {"class_weight": 13},
        {"num_valid": ()},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_loss_of_fake_tensors(options: Any, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, weight, targets = operands()
        tensors = {k: torch.ones(v) for k, v in options.items() if k in ("class_weight", "num_valid")}
        loss = LossOptions(**(options | tensors))
        found: Any = tiled_linear_cross_entropy(x.to(dtype), weight.to(dtype), targets, loss=loss, num_shards=4)
        value = found.loss if loss.outputs else found
        assert value.shape == ((2, 9) if loss.reduction == "none" else ())
        value.sum().backward()
        assert isinstance(x.grad, FakeTensor)
        assert isinstance(weight.grad, FakeTensor)
        with pytest.raises(SpecError, match="targets must"):
            tiled_linear_cross_entropy(x, weight, targets[:, :5], num_shards=4)


def test_a_mean_is_not_looked_for_in_fake_tensors_but_in_the_first_real_ones() -> None:
    def fn(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).flatten(0, -2), targets.flatten())

    with FakeTensorMode():
        x, weight, targets = operands()
        tiled_loss(fn, x, weight, targets, num_shards=3).backward()
        assert isinstance(weight.grad, FakeTensor)
    with pytest.raises(SpecError, match="mean"):
        tiled_loss(fn, *operands(), num_shards=3)

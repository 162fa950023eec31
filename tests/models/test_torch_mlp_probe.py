"""A module is the formula of an MLP only if its values and its gradients are, of small tokens and of large ones."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.test_torch_models import assert_same, build
from tiled_torch import tile_model, tiling_paths, untile_model


class CutInBackward(torch.autograd.Function):
    """x itself, whose gradient is zero where x is larger than a limit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.inside = x.abs() <= limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:  # type: ignore[override]
        return dx * ctx.inside, None


class Cut(nn.Module):
    """gate, up, down, of which one thing is cut off at a limit, or in backward, or whose gate has no gradient."""

    def __init__(self, where: str, limit: float) -> None:
        super().__init__()
        self.where, self.limit = where, limit
        self.gate_proj, self.up_proj = (nn.Linear(16, 24, bias=False, dtype=torch.float64) for _ in range(2))
        self.down_proj = nn.Linear(24, 16, bias=False, dtype=torch.float64)

    def cut(self, where: str, x: Tensor) -> Tensor:
        return x.clamp(-self.limit, self.limit) if where == self.where else x

    def forward(self, x: Tensor) -> Tensor:
        x = CutInBackward.apply(x, self.limit) if self.where == "backward" else x  # type: ignore[assignment]
        gate, up = self.cut("gate", self.gate_proj(x)), self.cut("up", self.up_proj(x))
        act = F.silu(gate.detach() if self.where == "no gradient" else gate)
        return self.cut("y", self.down_proj(self.cut("h", act * up)))


def results(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(y.square().sum(), [leaf, *named.values()], allow_unused=True)
    gradients = dict(zip(("x", *named), found, strict=True))
    return y.detach(), {name: torch.zeros(()) if each is None else each for name, each in gradients.items()}


def made(where: str, limit: float) -> Cut:
    torch.manual_seed(3)
    return Cut(where, limit)


@pytest.mark.parametrize("limit", [0.5, 10.0, 500.0])
@pytest.mark.parametrize("where", ["gate", "up", "h", "y", "backward", "no gradient"])
def test_what_is_cut_off_is_seen(where: str, limit: float) -> None:
    module, x = made(where, limit), 20 * limit * torch.randn(2, 9, 16, dtype=torch.float64)
    expected = results(module, x)
    tile_model(module, num_shards=3)
    assert tiling_paths(module)[""] != "tiled_mlp"
    assert_same(results(module, x), expected)


def test_what_is_not_cut_off_is_the_formula() -> None:
    module, x = made("nowhere", 1.0), torch.randn(2, 9, 16, dtype=torch.float64)
    expected = results(module, x)
    tile_model(module, num_shards=3)
    assert tiling_paths(module) == {"": "tiled_mlp"}
    assert_same(results(module, x), expected)


@pytest.mark.parametrize("kind", ["starcoder2", "qwen2_moe"])
def test_probes_have_values_where_tensors_have_none(kind: str) -> None:
    """Under fake tensors, by which memory is estimated, a model is tiled as it is outside."""
    config = build(kind).config
    outside = tile_model(transformers.AutoModelForCausalLM.from_config(config))
    with FakeTensorMode():
        inside = tile_model(transformers.AutoModelForCausalLM.from_config(config))
    assert tiling_paths(inside) == tiling_paths(outside)
    assert "tiled_mlp" in tiling_paths(inside).values()


class Scaled(nn.Module):
    """Divides by the largest value so far."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.largest = linear, nn.Buffer(torch.ones((), dtype=linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.linear(x / self.largest)


@pytest.mark.parametrize("grads", [True, False])
def test_state_is_written_once_with_all_tokens(grads: bool) -> None:
    """By shards the first tokens would be divided by what is the largest among them."""
    model = build("llama").model
    mlp = model.layers[0].mlp
    mlp.up_proj = Scaled(mlp.up_proj)
    tile_model(model, num_shards=3)
    assert mlp.up_proj.largest == 1  # a probe leaves it
    x = torch.randn(2, 5, mlp.up_proj.linear.in_features, dtype=torch.float64) * torch.arange(1, 6)[:, None]
    with torch.set_grad_enabled(grads):
        told = pytest.warns(UserWarning, match="runs whole: it writes to its state") if grads else nullcontext()
        with told:
            y = mlp(x)
        assert tiling_paths(model)["layers.0.mlp"] == "untiled: it writes to its state"
        assert mlp.up_proj.largest == x.abs().max()
        mlp.up_proj.largest.fill_(1.0)
        assert torch.equal(untile_model(model).layers[0].mlp(x), y)

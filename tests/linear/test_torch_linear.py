"""`TiledLinear` in one process: sums, bytes, conversions, loading, subclasses and engines of one's own."""

import copy
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import SpecError, UnsupportedError
from shared_specs.collectives.partitions import bounds
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_near
from tests.core.torch_counting import GemmFlop, LiveBytes, saved_bytes
from tiled_torch import TiledLinear, TiledLinearReturnBias, tile

GRIDS = list(product((1, 2, 5), (1, 3, 7)))


def plain_layer(bias: bool = True, dtype: torch.dtype = torch.float64, inputs: int = 5, outputs: int = 7) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def assert_same_layer(found: nn.Linear, expected: nn.Linear) -> None:
    assert torch.equal(found.weight, expected.weight)
    assert (found.bias is None) == (expected.bias is None)
    assert found.bias is None or torch.equal(found.bias, expected.bias)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_conversions_keep_every_bit(grid, bias):
    linear = plain_layer(bias)
    layer = TiledLinear.from_linear(linear, in_splits=grid[0], out_splits=grid[1])
    assert layer.in_sizes == tuple(stop - start for start, stop in pairwise(bounds(5, grid[0])))
    assert_same_layer(layer.to_linear(), linear)
    other = TiledLinear(5, 7, bias=bias, in_splits=grid[0], out_splits=grid[1], dtype=torch.float64)
    other.copy_params_from(linear)
    assert_same_layer(other.to_linear(), linear)
    initial = TiledLinear(5, 7, bias=bias, in_splits=grid[0], init_linear=linear, dtype=torch.float64)
    assert_same_layer(initial.to_linear(), linear)
    linear.weight.data.zero_()
    assert layer.to_linear().weight.abs().min() > 0, "the tiles hold copies"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_bias_for_each_output_split(grid):
    layer = TiledLinear(5, 7, in_splits=grid[0], out_splits=grid[1])
    found = {(j, i) for j, i, *_ in layer.grid() if layer.linears[j][i].bias is not None}
    assert found == {(j, grid[0] - 1) for j in range(grid[1])}
    assert sum(p.numel() for p in layer.parameters()) == 5 * 7 + 7


def test_frozen_parameters_stay_frozen():
    linear = plain_layer().eval()
    linear.weight.requires_grad_(False)
    layer = TiledLinear.from_linear(linear, in_splits=2, out_splits=3)
    assert {p.requires_grad for name, p in layer.named_parameters() if name.endswith("weight")} == {False}
    assert {p.requires_grad for name, p in layer.named_parameters() if name.endswith("bias")} == {True}
    back = layer.to_linear()
    assert (back.weight.requires_grad, back.bias.requires_grad, back.training) == (False, True, False)


def test_initialisation_is_that_of_the_whole_layer():
    """Within 1/sqrt(in_features), not 1/sqrt(tile): and up to that bound."""
    layer = TiledLinear(64, 32, in_splits=16, out_splits=2)
    for parameter in layer.parameters():
        assert parameter.abs().max() <= 1 / 8
    assert layer.to_linear().weight.abs().max() > 0.9 / 8


@pytest.mark.parametrize("source", GRIDS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_load_between_grids_and_plain_layers(source, bias):
    linear = plain_layer(bias)
    state = nn.Sequential(TiledLinear.from_linear(linear, in_splits=source[0], out_splits=source[1])).state_dict()
    for state_dict in (state, nn.Sequential(linear).state_dict()):
        keys = list(state_dict)
        for grid in ((1, 1), (3, 2), (5, 7), source):
            layer = TiledLinear(5, 7, bias=bias, in_splits=grid[0], out_splits=grid[1], dtype=torch.float64)
            nn.Sequential(layer).load_state_dict(state_dict)
            assert_same_layer(layer.to_linear(), linear)
        assert list(state_dict) == keys, "loading changed the caller's dict"


def test_a_state_dict_that_does_not_fit_is_refused():
    layer = TiledLinear(5, 7, in_splits=2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(plain_layer(outputs=8).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(plain_layer(bias=False).state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        TiledLinear(5, 7, bias=False, in_splits=2).load_state_dict(plain_layer().state_dict())


def errors(dtype: torch.dtype, grid: tuple[int, int], size: int) -> dict[str, tuple[float, float]]:
    """(ours, the plain layer's) relative error of y and dx against float64."""
    linear = plain_layer(dtype=dtype, inputs=size, outputs=size)
    x = torch.randn(33, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    dy = torch.randn(33, size, generator=torch.Generator().manual_seed(2)).to(dtype)
    layers = {"ours": TiledLinear.from_linear(linear, in_splits=grid[0], out_splits=grid[1]), "plain": linear}
    layers["truth"] = copy.deepcopy(linear).double()
    found: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        given = (x.double() if name == "truth" else x).clone().requires_grad_()
        y = layer(given)
        y.backward(dy.to(y.dtype))
        assert given.grad is not None
        found[name] = {"y": y.detach().double().numpy(), "dx": given.grad.double().numpy()}
    return {
        key: tuple(relative_error(found[name][key], found["truth"][key]) for name in ("ours", "plain"))  # type: ignore[misc]
        for key in ("y", "dx")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [(64, 1), (1, 64), (16, 16)], ids=str)
def test_sums_over_many_tiles_are_made_in_float32(dtype, grid):
    """Added in 16 bits, a sum of 64 tiles errs by about four times as much as one product, and would fail."""
    for name, (ours, plain) in errors(dtype, grid, 128).items():
        assert ours <= limit(plain, str(dtype).removeprefix("torch.")), name


def test_the_limit_would_find_sums_in_16_bits(monkeypatch):
    from tiled_torch.linear import module as linear

    monkeypatch.setattr(linear, "shared_input", lambda x, tiles: lambda: x)
    monkeypatch.setattr(linear, "add_partial", lambda index, total, new: new if total is None else total + new)
    ours, plain = errors(torch.bfloat16, (64, 1), 128)["y"]
    assert ours > limit(plain, "bfloat16")
    ours, plain = errors(torch.bfloat16, (1, 64), 128)["dx"]
    assert ours > limit(plain, "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_x_once(dtype):
    layer = TiledLinear(24, 30, in_splits=3, out_splits=5, dtype=dtype)
    x = torch.randn(7, 24, dtype=dtype, requires_grad=True)
    _, kept = saved_bytes(lambda: layer(x), [*layer.parameters()])
    assert kept == x.numel() * x.element_size()


def test_frozen_input_costs_no_gradient():
    layer, x = TiledLinear(24, 30, in_splits=3, out_splits=5), torch.randn(7, 24)
    with GemmFlop() as meter:
        layer(x).sum().backward()
    assert meter.flop == 2 * (2 * 7 * 24 * 30)


@pytest.mark.parametrize("grid", [(1, 1), (3, 5)], ids=str)
def test_no_more_work_than_the_plain_layer(grid):
    layer = TiledLinear(24, 30, in_splits=grid[0], out_splits=grid[1])
    x = torch.randn(7, 24, requires_grad=True)
    with GemmFlop() as meter:
        layer(x).sum().backward()
    assert meter.flop == 3 * (2 * 7 * 24 * 30)


def test_forward_bytes():
    """One output split is summed in float32 at a time; y exists twice while the splits are joined."""
    layer = TiledLinear(32, 64, in_splits=4, out_splits=8, dtype=torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    y, split = 2 * 16 * 64, 16 * 8
    with torch.no_grad(), LiveBytes() as meter:
        layer(x)
    assert meter.peak <= max(2 * y, y + split * (4 + 2 + 2))


class Counting(nn.Linear):
    """Counts calls, and needs an argument of its own."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, factor: float, **placed: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, **placed)
        self.factor, self.calls = factor, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.factor * super().forward(x)


def test_tiles_of_another_class():
    layer = TiledLinear(5, 7, in_splits=2, out_splits=3, linear_cls=Counting, linear_args={"factor": 2.0})
    linear, x = plain_layer(dtype=torch.float32), torch.randn(4, 5)
    layer.copy_params_from(linear)
    assert_near(layer(x), 2 * linear(x))
    assert [layer.linears[j][i].calls for j, i, *_ in layer.grid()] == [1] * 6
    with pytest.raises(TypeError, match="factor"):
        TiledLinear(5, 7, linear_cls=Counting)


class Backwards(TiledLinear):
    """Every step overridden: splits reversed, the largest partial output instead of their sum, outputs as a tuple."""

    def split_input(self, x: Any) -> Any:
        return tuple(part.flip(0) for part in super().split_input(x))

    def reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        assert (current_out is None) == (in_id == 0)
        return new_out if current_out is None else torch.maximum(current_out, new_out)

    def combine_outputs(self, outputs: list[Any]) -> Any:
        return tuple(outputs)


def test_the_steps_can_be_overridden():
    layer, x = Backwards(6, 4, bias=False, in_splits=2, out_splits=2), torch.randn(3, 6)
    found = layer(x)
    weight = layer.to_linear().weight
    x = x.flip(0)
    expected = torch.maximum(x[:, :3] @ weight[:, :3].T, x[:, 3:] @ weight[:, 3:].T)
    assert isinstance(found, tuple)
    assert_near(torch.cat(found, -1), expected)


class Forgetful(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("what", ["subclass", "hook", "parametrization"])
def test_from_linear_refuses_what_it_would_drop(what):
    linear = Forgetful(5, 7) if what == "subclass" else plain_layer()
    if what == "hook":
        linear.register_forward_hook(lambda module, args, out: 2 * out)
    if what == "parametrization":
        nn.utils.parametrizations.weight_norm(linear)
    with pytest.raises(UnsupportedError, match=r"TiledLinear\.from_linear: linear must be a plain layer, got "):
        TiledLinear.from_linear(linear, in_splits=2)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3)], ids=str)
def test_return_bias_through_the_layer_of_ones_own(grid):
    """The bias comes back with its gradient, and is nowhere in the output."""
    linear = plain_layer()
    layer = TiledLinearReturnBias.from_linear(linear, in_splits=grid[0], out_splits=grid[1])
    x = torch.randn(4, 5, dtype=torch.float64)
    y, bias = layer(x)
    assert torch.equal(bias, linear.bias)
    assert_near(y, x @ linear.weight.T)
    (y + bias).sum().backward()
    grads = [layer.linears[j][grid[0] - 1].bias.grad for j in range(grid[1])]
    assert torch.equal(torch.cat(grads), torch.full((7,), 4.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpointing_and_two_backwards(checkpointed, dtype):
    """Gradients of two micro-batches add up, each parameter's hook fires once per backward."""
    from torch.utils.checkpoint import checkpoint

    layer = TiledLinear(5, 7, in_splits=2, out_splits=3, dtype=dtype)
    once = copy.deepcopy(layer)
    fired: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    for _ in range(2):
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.sum().backward()  # type: ignore[union-attr]
    assert sorted(fired) == sorted(2 * [name for name, _ in layer.named_parameters()])
    given = x.detach().requires_grad_()
    once(given).sum().backward()
    assert x.grad is not None
    assert given.grad is not None
    assert torch.equal(x.grad, 2 * given.grad)
    for found, expected in zip(layer.parameters(), once.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, 2 * expected.grad)


def test_second_order():
    layer = TiledLinear(3, 4, in_splits=2, out_splits=2, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_autocast_sums_in_float32():
    """Tiles run in bfloat16; the float32 x gets float32 sums."""
    linear = plain_layer(dtype=torch.float32, inputs=64, outputs=64)
    layer = TiledLinear.from_linear(linear, in_splits=16, out_splits=16)
    truth = copy.deepcopy(linear).double()
    grads = {}
    for name, module in (("ours", layer), ("plain", linear)):
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        grads[name] = x.grad
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    truth(x).square().sum().backward()
    assert grads["ours"].dtype == torch.float32
    ours, plain = (relative_error(grads[name].double().numpy(), x.grad.numpy()) for name in ("ours", "plain"))
    assert ours <= limit(plain, "bfloat16")


class MLP(nn.Module):
    """A gated MLP of tiled linears: gate and up give their output splits, down takes them as its input splits."""

    def __init__(self, hidden: int, intermediate: int, splits: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "dtype": dtype}
        apart = {"out_splits": splits, "combine_out_splits": False}
        self.gate = TiledLinear(hidden, intermediate, **apart, **options)
        self.up = TiledLinear(hidden, intermediate, **apart, **options)
        self.down = TiledLinear(intermediate, hidden, in_splits=splits, input_is_already_split=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down([nn.functional.silu(gate) * up for gate, up in zip(self.gate(x), self.up(x), strict=True)])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_sequence_shards_of_weight_tiles(splits, num_shards):
    mlp = MLP(6, 10, splits)
    plain = [getattr(mlp, name).to_linear() for name in ("gate", "up", "down")]
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    given = x.detach().requires_grad_()
    tile(mlp, num_shards=num_shards)(x).square().sum().backward()
    gate, up, down = plain
    down(nn.functional.silu(gate(given)) * up(given)).square().sum().backward()
    assert x.grad is not None
    assert given.grad is not None
    assert relative_error(x.grad.numpy(), given.grad.numpy()) <= DISTRIBUTED_FLOAT64
    for name, whole in zip(("gate", "up", "down"), plain, strict=True):
        layer = getattr(mlp, name)
        for j, i, rows, columns in layer.grid():
            found, expected = layer.linears[j][i].weight.grad, whole.weight.grad[rows, columns]
            assert relative_error(found.numpy(), expected.numpy()) <= DISTRIBUTED_FLOAT64


def test_meta_device():
    layer = TiledLinear(5, 7, in_splits=2, out_splits=3, device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.ones(2, 5)).isfinite().all()


def test_repr_and_copies():
    layer = TiledLinear(5, 7, in_splits=2, out_splits=3)
    assert "in_features=5, out_features=7, bias=True, in_splits=2, out_splits=3" in repr(layer)
    linear = plain_layer(dtype=torch.float32)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(linear.state_dict())
    assert_same_layer(copied.to_linear(), linear)
    assert not torch.equal(layer.to_linear().weight, linear.weight)


def test_subclass_names_stand_in_messages():
    with pytest.raises(SpecError, match="TiledLinearReturnBias: in_splits must be in"):
        TiledLinearReturnBias(5, 7, in_splits=6)

"""DeepSpeed's names: values and gradients against untiled ones, its way to reduce, attributes, override points, exceptions."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import SpecError
from tests.compat.test_torch_liger import assert_alike, results
from tiled_torch.compat.deepspeed import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledLinear,
    TiledLinearReturnBias,
    TiledMLP,
    sequence_tiled_compute,
)

B, S, H, V = 2, 13, 6, 9


class Model(nn.Module):
    """An MLP and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(H, 8), nn.Linear(8, H), nn.Linear(H, V)
        self.double()

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).reshape(-1, V), y.reshape(-1))

    def parts(self) -> list[Tensor]:
        return [*self.up.parameters(), *self.down.parameters()]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, S, H, dtype=torch.float64), torch.randint(0, V, (B, S))


@pytest.mark.parametrize("shards", [1, 4, 40])
@pytest.mark.parametrize("named", [True, False])
def test_mlp(shards: int, named: bool) -> None:
    model, (x, _) = Model(), data()
    given: Any = model.parts() if named else None
    for a in (x, x[0], x.transpose(0, 1)):
        found = results(lambda a: TiledMLP.apply(Model.mlp, model, a, shards, given), a, model.parts())
        assert_alike(found, results(model.mlp, a, model.parts()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_is_reduced_over_shards(reduction: str) -> None:
    """Every shard weighs alike, also the short one at the end."""
    model, (x, y) = Model(), data()
    parameters = list(model.head.parameters())

    def expected(a: Tensor) -> Tensor:
        parts = zip(a.flatten(0, 1).split(7), y.flatten().split(7), strict=True)
        losses = torch.stack([model.loss(*part) for part in parts])
        return losses.mean() if reduction == "mean" else losses.sum()

    def ours(a: Tensor) -> Tensor:
        return TiledFusedLogitsLoss.apply(Model.loss, model, a, y, None, 4, parameters, reduction)

    assert_alike(results(ours, x, parameters), results(expected, x, parameters))


def test_loss_with_a_mask_of_the_tokens() -> None:
    model, (x, y) = Model(), data()
    mask, parameters = torch.arange(B * S).view(B, S) % 3 > 0, list(model.head.parameters())

    def fn(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        assert x.dim() == 2
        return (F.cross_entropy(model.head(x), y, reduction="none") * mask).sum()

    found = results(lambda a: TiledFusedLogitsLoss.apply(fn, model, a, y, mask, 3, parameters, "sum"), x, parameters)
    whole = results(lambda a: fn(model, a.flatten(0, 1), y.flatten(), mask.flatten()), x, parameters)
    assert_alike(found, whole)


def test_loss_in_the_dtype_that_fn_returns() -> None:
    x, y = data()
    model, x = Model().bfloat16(), x.bfloat16()
    assert TiledFusedLogitsLoss.apply(Model.loss, model, x, y, None, 4, None, "mean").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_reduction": "none"}, "output_reduction must be mean or sum, got 'none'"),
        ({"y": torch.zeros(B, S + 1, dtype=torch.long)}, "y must be .2, 13. or more, as x begins"),
        ({"x": torch.zeros(S)}, "x must be .batch, tokens"),
        ({"mask": torch.zeros(B, S + 1)}, "mask must be .2, 13."),
        ({"shards": 0}, "shards must be >= 1, got 0"),
    ],
)
def test_losses_that_are_refused(change: dict[str, Any], text: str) -> None:
    x, y = data()
    given: dict[str, Any] = {"x": x, "y": y, "mask": None, "shards": 2, "compute_params": [], "output_reduction": "sum"}
    with pytest.raises(ValueError, match=text):
        TiledFusedLogitsLoss.apply(Model.loss, Model(), *(given | change).values())


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_along_the_sequence(reduction: str | None) -> None:
    """fn sees a stretch of positions of every row of the batch."""
    model, (x, _) = Model(), data()
    shapes: set[tuple[int, ...]] = set()

    def fn(x: Tensor, scale: Tensor, model: Any, add: float) -> Tensor:
        shapes.add(tuple(x.shape))
        return model.mlp(x) * scale[..., None] + add

    def whole(a: Tensor) -> Tensor:
        y = fn(a, scale, model, 2.0)
        return y if reduction is None else y.mean() if reduction == "mean" else y.sum()

    scale = torch.arange(1.0, B * S + 1, dtype=torch.float64).view(B, S)
    cut, passed = {"x": x, "scale": scale}, {"model": model, "add": 2.0}
    options: dict[str, Any] = {"output_unshard_dimension": 1, "output_reduction": reduction}

    def ours(a: Tensor) -> Tensor:
        return sequence_tiled_compute(fn, S, 4, cut | {"x": a}, passed, "x", model.parts(), **options)

    found = results(ours, x, model.parts())
    assert shapes >= {(B, 4, H), (B, 1, H)}
    assert max(shape[1] for shape in shapes) == 4
    assert_alike(found, results(whole, x, model.parts()))


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_losses_along_the_sequence(reduction: str | None) -> None:
    model, (x, y) = Model(), data()
    parameters = list(model.head.parameters())

    def fn(x: Tensor, y: Tensor, self: Any) -> Tensor:
        return self.loss(x, y)

    def expected(a: Tensor) -> Tensor:
        parts = zip(a.split(4, 1), y.split(4, 1), strict=True)
        losses = torch.stack([model.loss(*part) for part in parts])
        return losses if reduction is None else losses.mean() if reduction == "mean" else losses.sum()

    def ours(a: Tensor) -> Tensor:
        keys = ["x", "y"], ["self"], "x"
        return SequenceTiledCompute.apply(fn, S, 4, *keys, None, 0, reduction, a, y, model)

    assert_alike(results(ours, x, parameters), results(expected, x, parameters))


def test_sequences_that_are_refused() -> None:
    x, _ = data()

    def call(**change: Any) -> None:
        given: dict[str, Any] = {"seqlen": S, "shards": 2, "kwargs_to_shard": {"x": x}, "kwargs_to_pass": {}}
        given |= {"grad_requiring_tensor_key": "x"} | change
        sequence_tiled_compute(lambda x: x, **given)

    for change, text in (
        ({"grad_requiring_tensor_key": "y"}, "grad_requiring_tensor_key must be one of x, got 'y'"),
        ({"seqlen": S + 1}, "must be .2, 14, ...., got .2, 13, 6."),
        ({"output_unshard_dimension": 2}, "output_unshard_dimension must be 0"),
        ({"output_reduction": "max"}, "output_reduction must be None, mean or sum"),
        ({"output_unshard_dimension": 0}, "fn's result must be a scalar of each shard"),
    ):
        with pytest.raises(ValueError, match=text):
            call(**change)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(grid: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(5, 7, bias=bias, dtype=torch.float64)
    layer = TiledLinear(5, 7, bias, *grid, init_linear=base, dtype=torch.float64)
    assert (layer.in_splits, layer.out_splits, layer.use_bias) == (*grid, bias)
    for out_id, (start, stop) in enumerate(pairwise(layer.out_parts)):
        for in_id, (first, last) in enumerate(pairwise(layer.in_parts)):
            tile: Any = layer.linears[out_id][in_id]  # type: ignore[index]
            assert torch.equal(tile.weight, base.weight[start:stop, first:last])
            assert (tile.bias is None) == (not bias or in_id < grid[0] - 1)
    x = torch.randn(3, 5, dtype=torch.float64)
    assert_alike(results(layer, x, []), results(base, x, []))
    parted = TiledLinear(5, 7, bias, *grid, True, False, nn.Linear, base, dtype=torch.float64)
    given = x if grid[0] == 1 else list(x.split([b - a for a, b in pairwise(layer.in_parts)], -1))
    outputs = parted(given)  # one input split is never a list, as there
    assert len(outputs) == grid[1]
    assert_alike([torch.cat(outputs, -1).detach()], [base(x).detach()])


@pytest.mark.parametrize("splits", [(0, 1), (1, 0), (6, 1), (1, 8)])
def test_splits_out_of_range(splits: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match=r"TiledLinear: (in|out)_splits must be in \[1, [57]\]"):
        TiledLinear(5, 7, in_splits=splits[0], out_splits=splits[1])


def test_layers_and_inputs_that_do_not_fit() -> None:
    layer = TiledLinear(5, 7, in_splits=2, input_is_already_split=True)
    for other in (nn.Linear(5, 6), nn.Linear(5, 7, bias=False), nn.ReLU()):
        with pytest.raises(AssertionError, match=r"TiledLinear.copy_params_from: other must be a layer"):
            layer.copy_params_from(other)
    with pytest.raises(AssertionError, match="x must be 2 input splits, got 3"):
        layer([torch.ones(1, 2)] * 3)


class WithBias(nn.Linear):
    """Returns its bias, as Megatron's layers do."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_bias_beside_the_output(bias: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(5, 7, bias=bias)
    options: dict[str, Any] = {
        "bias": bias,
        "in_splits": 2,
        "out_splits": 3,
        "linear_cls": WithBias,
        "init_linear": base,
    }
    x = torch.ones(2, 5)
    y, found = TiledLinearReturnBias(5, 7, **options)(x)
    assert torch.allclose(y, F.linear(x, base.weight), rtol=0, atol=torch.finfo(y.dtype).eps * 4)
    assert (found is None) == (not bias)
    assert found is None or torch.equal(found, base.bias)
    pairs = TiledLinearReturnBias(5, 7, combine_out_splits=False, **options)(x)
    assert [(a.shape[-1], None if b is None else b.shape[0]) for a, b in pairs] == [
        (size, size if bias else None) for size in (3, 2, 2)
    ]


def test_steps_that_a_subclass_overrides() -> None:
    calls: list[Any] = []

    class Own(TiledLinear):
        def _split_global_input(self, input: Any, split_sizes: Any) -> Any:
            calls.append(tuple(split_sizes))
            return super()._split_global_input(input, split_sizes)

        def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
            calls.append((in_id, out_id, current_out is None))
            return new_out if current_out is None else current_out + new_out

        def _combine_output_splits(self, outputs: Any) -> Any:
            return 2 * super()._combine_output_splits(outputs)

    layer = Own(5, 7, in_splits=2, out_splits=2)
    plain, x = layer.to_linear(), torch.ones(3, 5)
    assert torch.allclose(layer(input_=x), 2 * plain(x), rtol=0, atol=torch.finfo(x.dtype).eps * 8)
    assert calls == [(3, 2), (0, 0, True), (1, 0, False), (0, 1, True), (1, 1, False)]


def test_further_arguments_are_of_the_tiles() -> None:
    made: list[dict[str, Any]] = []

    def linear(inputs: int, outputs: int, bias: bool, **kwargs: Any) -> nn.Module:
        made.append(kwargs)
        return nn.Linear(inputs, outputs, bias)

    TiledLinear(4, 4, in_splits=2, linear_cls=linear, gain=3)
    assert made == [{"gain": 3}] * 2
    with pytest.raises((TypeError, SpecError)):
        TiledLinear(4, 4, linear_cls=3)  # type: ignore[arg-type]

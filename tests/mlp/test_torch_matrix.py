"""Lengths, shards, dims, layouts, frozen x, biases and accumulation, against plain PyTorch in float64: the table that would
have caught the known defects of sequence-tiled MLPs. tests/mlp/test_both_mlp.py has the options of both halves."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.matrix import pairwise
from tiled_torch import tiled_mlp

HIDDEN, INTERMEDIATE = 6, 10
LAYOUTS = ("contiguous", "sliced", "transposed")


def lay_out(layout: str, *shape: int) -> tuple[Tensor, Any]:
    """(a leaf, a function from it to a tensor of the shape with that layout)."""
    if layout == "sliced":
        wider = (*shape[:-2], shape[-2] + 1, shape[-1] + 2)
        return torch.randn(wider, dtype=torch.float64), lambda leaf: leaf[..., 1:, 1:-1]
    if layout == "transposed":
        swapped = (*shape[:-2], shape[-1], shape[-2])
        return torch.randn(swapped, dtype=torch.float64), lambda leaf: leaf.transpose(-1, -2)
    return torch.randn(shape, dtype=torch.float64), lambda leaf: leaf


def run(mlp: Any, leaf: Tensor, view: Any, params: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y and what one backward leaves in every .grad, and the same of a second one, which adds to it."""
    found = []
    for tensor in (leaf, *params):
        tensor.grad = None
    for _ in range(2):
        y = mlp(view(leaf), *params)
        y.backward(dy)
        found += [y.detach(), *(t.grad.clone() for t in (leaf, *params) if t.requires_grad)]
    return found


AROUND: dict[str, tuple[Any, ...]] = {
    "lead": ((), (1,), (3,)),
    "x_layout": LAYOUTS,
    "dy_layout": LAYOUTS,
    "x_grad": (True, False),
    "bias": (True, False),
    "keep": (0.0, 0.5),
}
ROWS = pairwise(AROUND, lambda row: True)


@pytest.mark.parametrize("num_shards", [1, 4, 8, 64])
@pytest.mark.parametrize("S", [1, 9, 32, 33])
def test_matrix(S: int, num_shards: int) -> None:
    """Every length in every number of shards with every two values of two of the rest."""
    for row in ROWS:
        assert_as_plain(S, num_shards, **row)


def assert_as_plain(
    S: int, num_shards: int, lead: tuple[int, ...], x_layout: str, dy_layout: str, x_grad: bool, bias: bool, keep: float
) -> None:
    torch.manual_seed(S)
    shapes = [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)]
    shapes += [(INTERMEDIATE,), (INTERMEDIATE,), (HIDDEN,)] if bias else []
    params = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *b: Tensor) -> Tensor:
        b_gate, b_up, b_down = b or (None, None, None)
        return F.linear(F.silu(F.linear(x, gate, b_gate)) * F.linear(x, up, b_up), down, b_down)

    def tiled(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *b: Tensor) -> Tensor:
        biases = dict(zip(("gate", "up", "down"), b, strict=True)) if b else None
        return tiled_mlp(x, gate, up, down, biases=biases, num_shards=num_shards, keep=keep)

    dims = (*lead, S)
    leaf, view = lay_out(x_layout, *dims, HIDDEN)
    dy_leaf, dy_view = lay_out(dy_layout, *dims, HIDDEN)
    leaf.requires_grad_(x_grad)
    results = [run(mlp, leaf, view, params, dy_view(dy_leaf)) for mlp in (tiled, plain)]
    assert len(results[0]) == len(results[1]) == 2 * (1 + len(params) + x_grad)
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= DISTRIBUTED_FLOAT64, (dims, x_layout, dy_layout)

"""Every combination of batch, length, shards, dims, layouts, frozen x, biases and accumulation, against plain PyTorch in
float64: the table that would have caught the known defects of sequence-tiled MLPs. Then the combinations of everything else,
every two options at least, that the JAX half runs too (tests/mlp/test_jax_matrix.py)."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.mlp.cases import MLPCase, make_inputs
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.adapters import ADAPTERS
from tests.asserting import assert_within
from tests.matrix import MATRIX
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


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_shards", [1, 4, 8, 64])
@pytest.mark.parametrize("S", [1, 9, 32, 33])
def test_matrix(S: int, num_shards: int, bias: bool, keep: float) -> None:
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

    combinations = itertools.product([(S,), (1, S), (3, S)], LAYOUTS, LAYOUTS, [True, False])
    for dims, x_layout, dy_layout, x_grad in combinations:
        leaf, view = lay_out(x_layout, *dims, HIDDEN)
        dy_leaf, dy_view = lay_out(dy_layout, *dims, HIDDEN)
        leaf.requires_grad_(x_grad)
        results = [run(mlp, leaf, view, params, dy_view(dy_leaf)) for mlp in (tiled, plain)]
        assert len(results[0]) == len(results[1]) == 2 * (1 + len(params) + x_grad)
        for ours, theirs in zip(*results, strict=True):
            assert relative_error(ours.numpy(), theirs.numpy()) <= DISTRIBUTED_FLOAT64, (dims, x_layout, dy_layout)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda a: F.relu(a) ** 2,
}


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.id)
def test_options(case: MLPCase) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in make_inputs(case).items()}
    dy = arrays.pop("dy")
    wanted = {name: array.requires_grad_() for name, array in arrays.items() if name not in case.frozen}

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, arrays[f"w_{name}"].T, arrays.get(f"b_{name}"))

    up, act = linear("up", arrays["x"]), ACTIVATIONS[case.activation]
    y = linear("down", act(linear("gate", arrays["x"])) * up if case.gated else act(up))
    gradients = torch.autograd.grad(y, list(wanted.values()), dy)
    expected = {"y": y.detach()} | {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    found = ADAPTERS["torch"].run(case)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_within(found[name], value.numpy(), DISTRIBUTED_FLOAT64, name)

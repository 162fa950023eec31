"""The MLP under torch.compile where callers are free: lengths, fractions that become symbols, one tensor in two roles."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tiled_torch import TiledMLP, tiled_linear_cross_entropy, tiled_mlp

# Raised inside torch's own tracer.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

D = torch.float64


def assert_same_gradients(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    pairs = [(ours, theirs)]
    pairs += zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, theirs)), strict=True)
    for a, b in pairs:
        assert relative_error(a.detach().numpy(), b.detach().numpy()) <= DISTRIBUTED_FLOAT64


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("num_shards", [None, 4], ids=["automatic", "4 shards"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_every_length_with_dynamic_shapes(keep: float, num_shards: int | None) -> None:
    """`keep` became a symbol that no length could be made of: "Source of '18 - Min(18, ...)' is None"."""
    torch.manual_seed(0)
    module = TiledMLP(8, 12, num_shards=num_shards, keep=keep, dtype=D)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (18, 25, 7):
        x = torch.randn(tokens, 8, dtype=D, requires_grad=True)
        assert_same_gradients(compiled(x), module(x), [x, *module.parameters()])


def test_one_graph_serves_every_length() -> None:
    """Where nothing is kept and the number of shards is given, nothing in a graph depends on the length."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    module = TiledMLP(8, 12, num_shards=4)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=count, dynamic=True)
    for tokens in (18, 25, 7, 100):
        compiled(torch.randn(tokens, 8))
    assert len(graphs) == 1


@pytest.mark.deep
def test_a_fraction_that_changes_from_call_to_call() -> None:
    torch.manual_seed(0)
    x, up, down = (torch.randn(shape, dtype=D, requires_grad=True) for shape in ((9, 8), (12, 8), (8, 12)))

    def call(x: Tensor, keep: float) -> Tensor:
        return tiled_mlp(x, None, up, down, num_shards=4, keep=keep)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for keep in (0.25, 0.75, 0.0, 1.0):
        assert_same_gradients(compiled(x, keep), call(x, keep), [x, up, down])


ROLES: dict[str, Any] = {
    "gate and up": lambda w, v: tiled_mlp(v, w, w, v, num_shards=2),
    "all": lambda w, v: tiled_mlp(w, w, w, w, num_shards=2) + v,
    "x and down, biases": lambda w, v: tiled_mlp(v, w, w, v, biases={"up": w[0], "gate": w[0]}, num_shards=2),
    "head": lambda w, v: tiled_linear_cross_entropy(w, w, torch.arange(8), bias=v[0], num_shards=2),
}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("roles", ROLES)
def test_one_tensor_in_two_roles(roles: str) -> None:
    """Refused by the compiler as "duplicate tensor input"."""
    torch.manual_seed(0)
    leaves = [torch.randn(8, 8, dtype=D, requires_grad=True) for _ in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(ROLES[roles], fullgraph=True, backend="aot_eager")
    assert_same_gradients(compiled(*leaves), ROLES[roles](*leaves), leaves)

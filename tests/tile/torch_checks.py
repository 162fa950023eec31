"""A module with every kind of result, and its comparison with the untiled one, for the tests of `tile`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs import tolerances
from tests.adapters import ADAPTERS
from tests.asserting import assert_within
from tiled_torch import tile

HIDDEN = 6


class Many(nn.Module):
    """Another width, a nested structure, integers, flattened router logits, a result without a gradient, None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(HIDDEN, 10), nn.Linear(10, 4), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.up(x))
        extra = {"router": self.router(x).reshape(-1, 3), "best": x.argmax(-1), "stats": h.detach().sum(-1)}
        return self.down(h), (h, extra), None


class Counting(nn.Module):
    """Writes one buffer in place and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("tokens", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.tokens += x.numel() // HIDDEN
            self.calls = self.calls + 1
        return self.linear(x)


def parts(result: Any) -> list[Any]:
    return pytree.tree_leaves(result)


def weighted(results: list[Any]) -> Tensor:
    """One loss on every differentiable result, each with weights of its own."""
    losses = [
        (r * torch.linspace(-1 - i, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum()
        for i, r in enumerate(results)
        if isinstance(r, Tensor) and r.requires_grad
    ]
    return torch.stack(losses).sum()


def assert_same(found: Tensor | None, expected: Tensor | None, what: str, allowed: float | None = None) -> None:
    if expected is None or not expected.numel():
        assert (found is None) == (expected is None), what
        assert found is None or expected is None or found.shape == expected.shape, what
        return
    assert found is not None, what
    to_numpy = ADAPTERS["torch"].to_numpy
    limit = tolerances.DISTRIBUTED_FLOAT64 if allowed is None else allowed
    assert_within(to_numpy(found), to_numpy(expected), limit, what)


def assert_equal_to_untiled(fn: Callable[..., Any], args: tuple[Any, ...], wanted: list[Tensor], **tiling: Any) -> None:
    """Results, their requires_grad and the gradients of `wanted` equal those of fn itself."""
    expected = parts(fn(*args))
    found = parts(tile(fn, **tiling)(*args))
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert type(f) is type(e)
        if isinstance(e, Tensor):
            assert (f.shape, f.dtype, f.requires_grad) == (e.shape, e.dtype, e.requires_grad)
            assert_same(f.detach().double(), e.detach().double(), f"result {i}")
    gradients = [torch.autograd.grad(weighted(r), wanted, allow_unused=True) for r in (found, expected)]
    for i, (f, e) in enumerate(zip(*gradients, strict=True)):
        assert_same(f, e, f"gradient {i}")


def draw(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def make(module: Callable[[], nn.Module]) -> Any:
    """The module in float64, its parameters from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return module().double()

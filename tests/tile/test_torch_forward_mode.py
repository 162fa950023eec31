"""Forward-mode derivatives through `tile` and `tiled_loss`: carried where nothing requires grad, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from shared_specs import UnsupportedError
from tests.tile.torch_checks import HIDDEN, assert_same, draw, make
from tiled_torch import tile, tiled_loss

TOKENS = 7
REFUSED = r"a call cannot have both tangents and gradients. Call it under torch.no_grad"

# PyTorch's first forward-mode derivative scripts formulas of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def rows(fn: Callable[[Tensor], Tensor], x: Tensor, tiled: bool) -> Tensor:
    return tile(fn, num_shards=3)(x) if tiled else fn(x)


def total(fn: Callable[[Tensor], Tensor], x: Tensor, tiled: bool) -> Tensor:
    each = lambda x: fn(x).square().sum()  # noqa: E731
    return tiled_loss(each, x, num_shards=3) if tiled else each(x)


calls = pytest.mark.parametrize("call", [rows, total])


def tangents(call: Any, *, of_x: bool, of_weight: bool, trainable: bool = False, needs_x: bool = False) -> list[Tensor]:
    """The tangents of the tiled function and of the function itself."""
    layer = make(lambda: nn.Linear(HIDDEN, 4)).requires_grad_(trainable)
    x, found = draw(TOKENS, HIDDEN, grad=needs_x), []
    for tiled in (True, False):
        with forward_ad.dual_level():
            weight = layer.weight
            if of_weight:
                weight = forward_ad.make_dual(weight, draw(4, HIDDEN, grad=False, seed=1))
            fn = lambda x, weight=weight: torch.tanh(x @ weight.T + layer.bias)  # noqa: E731
            y = call(fn, forward_ad.make_dual(x, draw(TOKENS, HIDDEN, grad=False, seed=2)) if of_x else x, tiled)
            found.append(forward_ad.unpack_dual(y).tangent)
    return found


@calls
@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("grad", [True, False], ids=["frozen", "no_grad"])
def test_tangents_are_carried(call, of_x, of_weight, grad):
    """Of x and of a weight alone; with frozen weights, and with trainable ones under no_grad."""
    with torch.set_grad_enabled(grad):
        found, expected = tangents(call, of_x=of_x, of_weight=of_weight, trainable=not grad)
    assert_same(found, expected, "tangent")


@calls
@pytest.mark.parametrize("which", [{"trainable": True}, {"needs_x": True}], ids=str)
@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_tangents_beside_backward_are_refused(call, which, of_x, of_weight):
    with pytest.raises(UnsupportedError, match=REFUSED):
        tangents(call, of_x=of_x, of_weight=of_weight, **which)


def test_a_tangent_that_only_later_tokens_have_is_not_dropped():
    weight, scale = draw(HIDDEN, grad=False), draw(HIDDEN, seed=1)
    x = draw(6, HIDDEN, grad=False)
    x[:2, 0], x[2:, 0] = -1, 1
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        fn = lambda x: x * dual * scale if x[0, 0] > 0 else x * scale  # noqa: E731
        with pytest.raises(UnsupportedError, match=REFUSED):
            tile(fn, num_shards=3)(x)
        with torch.no_grad():
            found = forward_ad.unpack_dual(tile(fn, num_shards=3)(x)).tangent
    assert torch.equal(found, torch.cat([torch.zeros(2, HIDDEN), x[2:] * scale.detach()]))


def test_the_tangent_of_an_upstream_gradient_is_not_dropped():
    layer, x = make(lambda: nn.Linear(HIDDEN, 4)), draw(TOKENS, HIDDEN)
    y = tile(layer, num_shards=3)(x)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(UnsupportedError, match=REFUSED):
            torch.autograd.grad(y, x, dy)


def test_a_level_without_tangents_changes_nothing():
    layer, x = make(lambda: nn.Linear(HIDDEN, 4)), draw(TOKENS, HIDDEN)
    with forward_ad.dual_level():
        found, expected = (torch.autograd.grad(fn(x).sum(), layer.weight) for fn in (tile(layer, num_shards=3), layer))
    assert_same(found[0], expected[0], "gradient")


def test_jvp_of_torch_func_is_refused():
    with pytest.raises(UnsupportedError, match=r"^tile: this call is inside torch.func"):
        torch.func.jvp(tile(torch.sin, num_shards=3), (draw(4, HIDDEN, grad=False),), (torch.ones(4, HIDDEN),))

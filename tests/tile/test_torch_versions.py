"""What fn reaches in backward is what it reached in forward: tensors changed since are an error, substituted ones stay."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.tile.torch_checks import HIDDEN, assert_same, draw, make
from tiled_torch import tile, tiled_loss

TOKENS = 6
FUNCTIONAL_CALLS = {"torch.func": torch.func.functional_call, "stateless": nn.utils.stateless.functional_call}
GLOBAL = torch.ones(HIDDEN, dtype=torch.float64)


def two_linears() -> Any:
    return make(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)))


def in_a_module(frozen: bool) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    module = two_linears()
    module[2].requires_grad_(not frozen)
    return module, module[2].weight


def a_buffer() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    module = two_linears()
    module.register_buffer("scale", torch.ones(HIDDEN, dtype=torch.float64))
    return lambda x: module(x) * module.scale, module.scale


def a_closure() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    scale = torch.ones(HIDDEN, dtype=torch.float64)
    return lambda x: x * scale, scale


def a_closure_for_later_tokens() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    held = [torch.ones(HIDDEN, dtype=torch.float64)]
    return lambda x: x * held[0] if x[0, 0] > 0 else x * 2, held[0]


def a_global() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return lambda x: x * GLOBAL, GLOBAL


REACHED: dict[str, Callable[[], tuple[Callable[[Tensor], Tensor], Tensor]]] = {
    "a trainable weight": lambda: in_a_module(frozen=False),
    "a frozen weight": lambda: in_a_module(frozen=True),
    "a buffer": a_buffer,
    "a closure": a_closure,
    "a closure, later tokens": a_closure_for_later_tokens,
    "a global": a_global,
}


def tokens() -> Tensor:
    """The first two tokens are negative in their first place, the others positive."""
    x = draw(TOKENS, HIDDEN, grad=False)
    x[:2, 0], x[2:, 0] = -1, 1
    return x.requires_grad_()


@pytest.mark.parametrize("reach", REACHED.values(), ids=REACHED.keys())
def test_a_tensor_changed_between_forward_and_backward_is_an_error(reach):
    """As autograd's own is for what it saves."""
    fn, tensor = reach()
    y = tile(fn, num_shards=3)(tokens()).sum()
    with torch.no_grad():
        tensor.mul_(0.5)
    message = (
        rf"^tile: one of the variables needed for gradient computation .* inplace operation.* \[.*{HIDDEN}\] that fn"
    )
    with pytest.raises(RuntimeError, match=message):
        y.backward()


def test_a_tensor_that_fn_does_not_reach_may_change():
    """An expert that no token chose, and a module that is only known."""
    module, unused, x = two_linears(), make(lambda: nn.Linear(HIDDEN, HIDDEN)), tokens()
    y = tile(lambda x: module(x) if len(x) else unused(x), num_shards=3)(x).sum()
    with torch.no_grad():
        unused.weight.zero_()
    y.backward()
    expected = torch.autograd.grad(module(x).sum(), x)
    assert_same(x.grad, expected[0], "gradient")


def test_a_submodule_replaced_before_backward_changes_nothing():
    module, x = two_linears(), tokens()
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    y = tile(module, num_shards=3)(x).sum()
    later = module[1] = nn.Identity()
    y.backward()
    assert_same(x.grad, expected, "gradient")
    assert module[1] is later


class Around(nn.Module):
    def __init__(self, module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.fn = module, [fn]  # in a list, so that it is no second home of the module's parameters

    def forward(self, x: Tensor) -> Tensor:
        return self.fn[0](x)


@pytest.mark.parametrize("api", FUNCTIONAL_CALLS.values(), ids=FUNCTIONAL_CALLS.keys())
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("derived", [True, False])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.filterwarnings("ignore:.*stateless.functional_call:FutureWarning")
def test_substituted_weights_are_those_of_backward(api, trainable, derived, called):
    """Leaves and tensors with a history, in place of trainable and of frozen weights; fn calls the module or reads it."""
    module = make(lambda: nn.Linear(HIDDEN, HIDDEN)).requires_grad_(trainable)
    fn = module if called else lambda x: F.linear(x, module.weight, module.bias).tanh()
    weight, bias, x = draw(HIDDEN, HIDDEN, seed=1), draw(HIDDEN, seed=2), draw(TOKENS, HIDDEN)
    gradients = []
    for each in (tile(fn, num_shards=3), fn):
        put_in = {"module.weight": weight * 2 if derived else weight, "module.bias": bias}
        y = api(Around(module, each), put_in, (x,)).square().sum()
        gradients.append(torch.autograd.grad(y, [weight, bias, x]))
    for f, e in zip(*gradients, strict=True):
        assert_same(f, e, "gradient")
    assert module.weight.grad is None
    assert isinstance(module.weight, nn.Parameter)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.T


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_cached_parametrizations(before, inside):
    """Weights computed before the call, in it and after it in one `cached` region; backward inside it or later."""
    module, x = make(lambda: nn.Linear(HIDDEN, HIDDEN)), draw(TOKENS, HIDDEN)
    parametrize.register_parametrization(module, "weight", Symmetric())
    wanted, gradients = [x, *module.parameters()], []
    for fn in (tile(module, num_shards=3), module):
        with parametrize.cached():
            first = module.weight.sum() if before else 0
            y = fn(x).square().sum() + module.weight.sin().sum() + first
            if inside:
                gradients.append(torch.autograd.grad(y, wanted))
        if not inside:
            gradients.append(torch.autograd.grad(y, wanted))
    for f, e in zip(*gradients, strict=True):
        assert_same(f, e, "gradient")
    assert not parametrize._cache


def test_a_weight_that_only_later_tokens_reach_is_not_lost():
    """x needs no gradient and the first tokens reach nothing that does: refused before results are handed out."""
    weight = nn.Parameter(draw(HIDDEN, HIDDEN).detach())
    fn = lambda x: x @ weight if (x[..., 0] > 0).all() else x * 1  # noqa: E731
    message = r"^tile: output 0 of fn must be in need of a gradient for every token or for none"
    with pytest.raises(NotImplementedError, match=message):
        tile(fn, num_shards=3)(tokens().detach())
    with torch.no_grad():
        assert torch.equal(tile(fn, num_shards=3)(tokens()), torch.cat([tokens()[:2], tokens()[2:] @ weight]))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, lambda _: nn.Softmax(-1)], ids=["rms", "layer", "softmax"])
@pytest.mark.parametrize("grads", [True, False], ids=["stateless", "stateful"])
def test_the_input_is_let_go_after_backward(norm, grads):
    """While the loss lives on. What saves its own result (a reciprocal root, a softmax) held the probe's view of x."""
    module: Any = norm(HIDDEN)
    if not grads:
        module = nn.Sequential(module, nn.BatchNorm1d(HIDDEN))
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True) * 1
    storage = x.untyped_storage()
    loss = tile(module, num_shards=3)(x).sum()
    loss.backward()
    del x
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "somebody else holds x"
    assert loss.requires_grad


def test_what_fn_holds_is_let_go_after_backward():
    """A mask in its closure, while the loss lives on."""
    mask = torch.ones(HIDDEN)
    storage = mask.untyped_storage()
    fn = (lambda mask: lambda x: x * mask)(mask)
    loss = tile(fn, num_shards=3)(torch.randn(TOKENS, HIDDEN, requires_grad=True)).sum()
    loss.backward()
    del mask, fn
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "somebody else holds the mask"
    assert loss.requires_grad


@pytest.mark.parametrize("mode", ["inside", "outside", "no_grad"])
def test_fake_tensors(mode):
    """Shapes of results and gradients; random states are not compared, nothing is written, no value is asked for."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as fake:
        module: Any = nn.Sequential(nn.Linear(HIDDEN, 9), nn.BatchNorm1d(9), nn.Dropout(0.5))
        x, targets = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.zeros(TOKENS, dtype=torch.long)
    with nullcontext() if mode == "outside" else fake, torch.set_grad_enabled(mode != "no_grad"):
        y = tile(module, num_shards=3)(x)
        loss = tiled_loss(lambda x, t: F.cross_entropy(module(x), t, reduction="sum"), x, targets, num_shards=3)
        assert isinstance(y, FakeTensor)
        assert (y.shape, loss.shape) == ((TOKENS, 9), ())
        if mode != "no_grad":
            (y.sum() + loss).backward()
            assert isinstance(module[0].weight.grad, FakeTensor)
            assert x.grad.shape == x.shape

"""`tile`: results and gradients of any token-wise function equal those of the function itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shared_specs import Tiling
from tests.tile.torch_checks import HIDDEN, Many, assert_equal_to_untiled, assert_same, draw, make, parts, weighted
from tiled_torch import tile

SHAPES = [(5, 6), (2, 4, 6), (3, 1, 6), (1, 6), (1, 1, 6), (2, 2, 3, 6), (0, 6), (2, 0, 6)]


@pytest.mark.parametrize("num_shards", [1, 3, 64, None])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_results_and_gradients_are_those_of_the_module(shape, num_shards):
    module, x = make(Many), draw(*shape)
    assert_equal_to_untiled(module, (x,), [x, *module.parameters()], num_shards=num_shards)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("shard_tokens", [1, 3])
def test_without_gradients_results_are_those_of_the_module(shape, shard_tokens):
    module, x = make(Many), draw(*shape)
    with torch.no_grad():
        expected, found = module(x), tile(module, tiling=Tiling(shard_tokens=shard_tokens))(x)
    for i, (f, e) in enumerate(zip(parts(found), parts(expected), strict=True)):
        assert (f is None) == (e is None)
        assert f is None or (f.shape, f.dtype, f.requires_grad) == (e.shape, e.dtype, False)
        assert f is None or not f.numel() or torch.equal(f, e) or f.is_floating_point()
        assert_same(f, e, f"result {i}")


def test_a_result_of_one_token_shards_keeps_its_own_leading_dims():
    """[1, t, 1] and [t, 1, 1] look alike where t is 1."""
    x = draw(2, 3, 1, grad=False)
    for fn in (lambda x: x * 2, lambda x: x.reshape(-1, 1, 1) * 2, lambda x: x.reshape(-1, 1) * 2):
        assert tile(fn, num_shards=6)(x).shape == fn(x).shape
        assert torch.equal(tile(fn, num_shards=6)(x), fn(x))


def test_gradcheck():
    w, scale = draw(HIDDEN, 4, seed=1), draw(4, seed=2)

    def fn(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(x @ w) ** 2 * scale

    assert torch.autograd.gradcheck(tile(fn, num_shards=3), (draw(2, 4, HIDDEN), w, scale))


def test_arguments_are_cut_by_leading_dims_or_passed_whole():
    x, mask, other, whole = draw(2, 5, HIDDEN), draw(2, 5, seed=1), draw(2, 5, 3, seed=2), draw(HIDDEN, seed=3)
    shapes = set()

    def fn(x: Tensor, mask: Tensor, *, more: dict[str, Tensor], flag: str) -> Tensor:
        shapes.add((tuple(mask.shape), tuple(more["whole"].shape), flag))
        return x * mask.unsqueeze(-1) * more["other"].sum(-1, keepdim=True) + more["whole"].sin()

    arguments = {"more": {"other": other, "whole": whole}, "flag": "on"}
    wanted = [x, mask, other, whole]
    expected = torch.autograd.grad(weighted([fn(x, mask, **arguments)]), wanted)
    shapes.clear()
    found = torch.autograd.grad(weighted([tile(fn, num_shards=5)(x, mask, **arguments)]), wanted)
    assert shapes == {((1, 2), (HIDDEN,), "on")}
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, "gradient")
    by_name = tile(fn, num_shards=5)(mask=mask, x=x, **arguments)
    assert_same(by_name.detach(), fn(x, mask, **arguments).detach(), "x by name")


def test_a_shard_that_does_not_depend_on_x():
    w, x = draw(HIDDEN, seed=1), draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.tensor([1.0, 1, -1, -1, 1, 1, -1, -1])
    x.requires_grad_()

    def fn(x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, x * w, w) if bool((x[:, 0] > 0).any()) else w.expand(x.shape)

    assert_equal_to_untiled(fn, (x,), [x, w], num_shards=4)


def test_the_upstream_gradient_is_left_as_it_was():
    """autograd hands out the gradient of a sum as the gradient of its terms, without a copy."""
    b, dy = draw(2, HIDDEN, seed=1), draw(6, HIDDEN, grad=False, seed=2)
    given = dy.clone()
    (found,) = torch.autograd.grad(tile(lambda x: x + b, num_shards=3)(draw(6, HIDDEN)), b, dy)
    assert torch.equal(dy, given)
    assert_same(found, given.view(3, 2, HIDDEN).sum(0), "bias for every shard")


def test_a_result_that_needs_a_gradient_only_later_is_refused():
    w, x = draw(HIDDEN, seed=1), draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.arange(8)
    module = nn.Module()
    module.w = nn.Parameter(w.detach())
    module.forward = lambda x: x * module.w if x[0, 0] > 4 else x * 1
    with pytest.raises(
        NotImplementedError, match=r"^tile: output 0 of fn must be in need of a gradient for every token"
    ):
        tile(module, num_shards=4)(x)


def views_of(kind: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    match kind:
        case "sliced":
            return draw(2, 6, HIDDEN), lambda base: base[:, 1:]
        case "transposed":
            return draw(5, 2, HIDDEN), lambda base: base.transpose(0, 1)
        case "strided":
            return draw(2, 5, 2 * HIDDEN), lambda base: base[..., ::2]
    return draw(1, 5, HIDDEN), lambda base: base.expand(2, 5, HIDDEN)


@pytest.mark.parametrize("kind", ["sliced", "transposed", "strided", "expanded"])
def test_views_in_and_out(kind):
    """x is a view of something that must receive the gradient; the upstream gradient is a view too."""
    module = make(Many)
    base, view = views_of(kind)
    wide = make(lambda: nn.Linear(base.shape[-1], base.shape[-1]))
    dy = draw(4, 5, 2, grad=False, seed=5).permute(2, 1, 0)
    found, expected = (
        torch.autograd.grad(
            fn(view(wide(base)))[0], [base, *wide.parameters(), *module.parameters()], dy, allow_unused=True
        )
        for fn in (tile(module, num_shards=3), module)
    )
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, kind)
    zero_stride = torch.ones((), dtype=torch.float64).expand(2, 5, 4)
    found, expected = (
        torch.autograd.grad(fn(view(base))[0], base, zero_stride)[0] for fn in (tile(module, num_shards=3), module)
    )
    assert_same(found, expected, f"{kind}, zero-stride gradient")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_loss_on_some_results_only(which):
    module, x = make(Many), draw(2, 5, HIDDEN)
    wanted = [x, *module.parameters()]
    found, expected = (
        torch.autograd.grad(weighted([parts(fn(x))[which]]), wanted, allow_unused=True)
        for fn in (tile(module, num_shards=3), module)
    )
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, f"gradient of result {which}")

"""`tile` finds every tensor that a function reaches and returns its gradient once, or refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import SpecError, tolerances
from tests.tile.torch_checks import HIDDEN, Many, assert_equal_to_untiled, assert_same, draw, make, parts, weighted
from tiled_torch import tile


def test_a_parameter_is_never_cut():
    """A weight [T, ...] is no tensor of T tokens."""
    x, weight = draw(4, 4), nn.Parameter(draw(4, 4, seed=1).detach())
    assert_equal_to_untiled(lambda x, w: x @ w, (x, weight), [x, weight], num_shards=2)


def test_leaves_in_closures_receive_gradients():
    w, b, x = draw(HIDDEN, 4, seed=1), draw(4, seed=2), draw(7, HIDDEN)
    module = make(lambda: nn.Linear(4, 4))

    def deeper(h: Tensor) -> Tensor:
        return module(h) + b

    assert_equal_to_untiled(lambda x: deeper(x @ w), (x,), [x, w, b, *module.parameters()], num_shards=3)


def test_x_may_also_be_a_closure():
    x = draw(5, HIDDEN)
    assert_equal_to_untiled(lambda h: h @ x.T @ x, (x,), [x], num_shards=2)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("frozen", [(), ("up.weight",), ("up.weight", "down.bias", "router.weight", "router.bias")])
def test_frozen_operands(requires_grad, frozen):
    module, x = make(Many), draw(2, 5, HIDDEN, grad=requires_grad)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    assert_equal_to_untiled(module, (x,), wanted, num_shards=3)


def test_nothing_trainable_gives_no_graph():
    module, x = make(Many).requires_grad_(False), draw(2, 5, HIDDEN, grad=False)
    assert not any(r.requires_grad for r in parts(tile(module, num_shards=3)(x)) if isinstance(r, Tensor))


def test_parameters_added_later_are_found():
    """As a LoRA library does: the base is frozen, two small trainable matrices join."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.randn(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    module = make(lambda: nn.Sequential(nn.Linear(HIDDEN, 8), nn.SiLU(), nn.Linear(8, HIDDEN)))
    tiled = tile(module, num_shards=3)
    module[0] = make(lambda: Adapted(module[0]))
    x = draw(7, HIDDEN, grad=False)
    found = torch.autograd.grad(weighted([tiled(x)]), [module[0].a, module[0].b, module[2].weight])
    expected = torch.autograd.grad(weighted([module(x)]), [module[0].a, module[0].b, module[2].weight])
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, "adapter")


def test_quantised_weights():
    """Integer weights in a buffer, dequantised in an autograd function of their own; the scale is trainable."""

    class Dequantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, codes: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(codes)
            return codes.double() * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            return None, (ctx.saved_tensors[0] * grad).sum()

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-8, 8, (4, HIDDEN), dtype=torch.int8))
            self.scale = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x @ Dequantise.apply(self.codes, self.scale).T

    module, x = make(Quantised), draw(2, 4, HIDDEN)
    assert_equal_to_untiled(module, (x,), [x, module.scale], num_shards=3)


class Experts(nn.Module):
    """Every token goes to one expert: the sign of its first feature decides, so shards reach different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts[:2]):
            rows = (x[:, 0] > 0) == bool(i)
            if rows.any():
                y = y.index_put((rows.nonzero().squeeze(1),), expert(x[rows]))
        return y


def test_an_expert_that_only_a_later_shard_reaches():
    module, x = make(Experts), draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.tensor([-1.0, -2, -3, -4, 1, 2, -5, 3], dtype=torch.float64)
    x.requires_grad_()
    chosen = [p for expert in module.experts[:2] for p in expert.parameters()]
    assert_equal_to_untiled(module, (x,), [x, *chosen], num_shards=4)
    unused = torch.autograd.grad(tile(module, num_shards=4)(x).sum(), module.experts[2].weight, allow_unused=True)
    assert unused == (None,)


def test_experts_whose_weights_are_computed_outside():
    """As FSDP1 with original parameters does: tensors with a history in the parameters' places."""
    module, x = make(Experts), draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.tensor([-1.0, -2, -3, -4, 1, 2, -5, 3], dtype=torch.float64)
    flats = [draw(HIDDEN, HIDDEN, seed=i) for i in range(2)]
    results = []
    for fn in (tile(module, num_shards=4), module):
        for expert, flat in zip(module.experts, flats, strict=False):
            expert._parameters["weight"] = (flat * 2).t()
        results.append(torch.autograd.grad(weighted([fn(x)]), flats))
    for f, e in zip(*results, strict=True):
        assert_same(f, e, "flat parameter")


def test_a_leaf_that_a_function_reaches_late_is_an_error():
    """A function has no list of parameters, so the gradient would be lost."""
    w, late = draw(HIDDEN, seed=1), draw(HIDDEN, seed=2)
    x = draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.arange(8)
    y = tile(lambda x: x * w + (x * late if x[0, 0] > 4 else 0), num_shards=4)(x)
    with pytest.raises(SpecError, match=r"^tile: only a later shard of fn reached a tensor of shape \[6\]\. Pass"):
        y.sum().backward()
    assert w.grad is None
    assert late.grad is None


def test_a_captured_result_is_refused():
    w = draw(HIDDEN, seed=1)
    scale = w * 2
    with pytest.raises(SpecError, match=r"^tile: a captured tensor that requires grad must be a leaf .* MulBackward0"):
        tile(lambda x: x * scale, num_shards=2)(draw(4, HIDDEN))
    as_argument = tile(lambda x, scale: x * scale, num_shards=2)(draw(4, HIDDEN), scale)
    (found,) = torch.autograd.grad(as_argument.sum(), [w])
    assert_same(found, 2 * draw(4, HIDDEN).detach().sum(0), "through an argument")


def test_an_attribute_with_a_history_and_the_leaf_behind_it():
    """What FSDP1 does to a module: each of the two gets its own part of the gradient, none is counted twice."""
    module, x = make(lambda: nn.Linear(HIDDEN, HIDDEN, bias=False)), draw(5, HIDDEN)
    flat = draw(HIDDEN * HIDDEN, seed=1)
    module.register_parameter("flat", nn.Parameter(flat.detach()))
    del module.weight
    results = []
    for fn in (tile(module, num_shards=3), module):
        module.weight = (module.flat * 2).view(HIDDEN, HIDDEN)
        y = fn(x) * module.weight.sum()
        results.append(torch.autograd.grad(weighted([y]), [x, module.flat]))
        assert module.weight.grad_fn is not None
    for f, e in zip(*results, strict=True):
        assert_same(f, e, "gradient behind an attribute")


def test_hooks_fire_once_on_the_summed_gradient():
    module, x = make(Many), draw(2, 5, HIDDEN)
    expected = torch.autograd.grad(weighted(parts(module(x))), list(module.parameters()))
    fired: dict[str, list[Tensor]] = {"accumulated": [], "halved": []}
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired["accumulated"].append(p))
        parameter.register_hook(lambda g: (fired["halved"].append(g), g / 2)[1])
    weighted(parts(tile(module, num_shards=5)(x))).backward()
    count = len(list(module.parameters()))
    assert len(fired["accumulated"]) == len(fired["halved"]) == count
    for parameter, e in zip(module.parameters(), expected, strict=True):
        assert_same(parameter.grad, e / 2, "halved gradient")


def test_gradients_are_returned_and_never_written():
    module, x = make(Many), draw(2, 5, HIDDEN)
    loss = weighted(parts(tile(module, num_shards=5)(x)))
    torch.autograd.grad(loss, [x], retain_graph=True)
    torch.autograd.grad(loss, [module.up.weight])
    assert all(t.grad is None for t in (x, *module.parameters()))


def test_two_backwards_before_a_step_add_up():
    module, x = make(Many), draw(2, 5, HIDDEN)
    for fn in (tile(module, num_shards=3), module):
        for _ in range(2):
            weighted(parts(fn(x))).backward()
    doubled = [p.grad for p in module.parameters()]
    single = torch.autograd.grad(weighted(parts(module(x))), list(module.parameters()))
    for f, e in zip(doubled, single, strict=True):
        assert_same(f, 4 * e, "accumulated gradient")


def test_main_grad_receives_the_sum_and_hooks_still_fire():
    """Megatron's convention: the gradient is added in place to a float32 buffer and a flag says so."""
    module, x = make(lambda: nn.Linear(HIDDEN, 4)).bfloat16(), draw(8, HIDDEN).bfloat16().detach()
    (expected,) = torch.autograd.grad(tile(module, num_shards=4)(x).sum(), [module.weight])
    module.weight.main_grad = torch.ones(4, HIDDEN)
    module.weight.grad_added_to_main_grad = False
    fired = []
    module.weight.register_post_accumulate_grad_hook(fired.append)
    tile(module, num_shards=4)(x).sum().backward()
    assert len(fired) == 1
    assert module.weight.grad_added_to_main_grad
    assert torch.equal((module.weight.main_grad - 1).bfloat16(), expected)
    assert not module.weight.grad.any()
    assert module.bias.grad is not None


@pytest.mark.parametrize("shards", [1, 8])
def test_main_grad_of_16_bits_is_rounded_once(shards: int):
    """What a float32 main_grad gets from all shards, added to what was there and rounded there once."""
    module, x = make(lambda: nn.Linear(HIDDEN, 4)).bfloat16(), draw(8, HIDDEN).bfloat16().detach()
    weight = module.weight
    weight.main_grad = torch.zeros(4, HIDDEN)
    tile(module, num_shards=shards)(x).square().sum().backward()
    exact, weight.main_grad = weight.main_grad, torch.full((4, HIDDEN), 3.0, dtype=torch.bfloat16)
    tile(module, num_shards=shards)(x).square().sum().backward()
    assert torch.equal(weight.main_grad, (exact + 3).bfloat16())
    assert weight.grad is None


def test_low_precision_gradients_are_summed_in_float32():
    """256 shards in bfloat16 err no more than the untiled module, both against float64."""
    T, H, I = 4096, 32, 48  # noqa: E741
    exact = make(lambda: nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)))
    x = draw(T, H, grad=False) + 0.25
    dy = draw(T, H, grad=False, seed=1) + 0.5
    half = make(lambda: nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H))).bfloat16()
    with torch.no_grad():
        for rounded, wide in zip(half.parameters(), exact.parameters(), strict=True):
            wide.copy_(rounded)
    truth = torch.autograd.grad(exact(x.bfloat16().double()), list(exact.parameters()), dy.bfloat16().double())
    errors = [
        [
            float((g.double() - t).norm() / t.norm())
            for g, t in zip(
                torch.autograd.grad(fn(x.bfloat16()), list(half.parameters()), dy.bfloat16()), truth, strict=True
            )
        ]
        for fn in (tile(half, num_shards=256), half)
    ]
    for tiled, untiled in zip(*errors, strict=True):
        assert tiled <= tolerances.BF16_256_SHARDS * untiled

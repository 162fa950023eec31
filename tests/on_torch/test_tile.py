"""`tile`: results and gradients of any token-wise function equal those of the function itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs import Tiling, tolerances
from tests.adapters import ADAPTERS
from tests.asserting import assert_within
from tiled_torch import SpecError, tile

HIDDEN = 6
SHAPES = [(5, 6), (2, 4, 6), (3, 1, 6), (1, 6), (1, 1, 6), (2, 2, 3, 6), (0, 6), (2, 0, 6)]


class Many(nn.Module):
    """Another width, a nested structure, integers, flattened router logits, a result without a gradient, None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(HIDDEN, 10), nn.Linear(10, 4), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.up(x))
        extra = {"router": self.router(x).reshape(-1, 3), "best": x.argmax(-1), "stats": h.detach().sum(-1)}
        return self.down(h), (h, extra), None


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


def test_a_leaf_that_a_function_reaches_late_is_an_error():
    """A function has no list of parameters, so the gradient would be lost."""
    w, late = draw(HIDDEN, seed=1), draw(HIDDEN, seed=2)
    x = draw(8, HIDDEN, grad=False)
    with torch.no_grad():
        x[:, 0] = torch.arange(8)
    y = tile(lambda x: x * w + (x * late if x[0, 0] > 4 else 0), num_shards=4)(x)
    with pytest.raises(
        SpecError, match=r"^tile: fn must be seen to reach every tensor .* shape \[6\] that only a later"
    ):
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

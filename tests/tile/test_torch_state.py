"""`tile` finds modules, generators and tensors that fn changes, however fn reaches them, and changes them in forward only."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tile.torch_checks import HIDDEN, Counting, assert_same, draw, make
from tiled_torch import tile, tiled_loss

TOKENS, SHARDS = 10, 5
Fn = Callable[..., Any]


class Calling:
    """A plain object that holds a module."""

    def __init__(self, module: nn.Module) -> None:
        self.held = {"module": module}

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)

    def method(self, x: Tensor) -> Tensor:
        return self.held["module"](x)


class Unregistered(nn.Module):
    """A module that holds another in a list, which nn.Module does not see."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.hidden = [module]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


def default_argument(module: nn.Module) -> Fn:
    def fn(x: Tensor, module: nn.Module = module) -> Tensor:
        return module(x)

    return fn


def keyword_default(module: nn.Module) -> Fn:
    def fn(x: Tensor, *, modules: tuple[nn.Module, ...] = (module,)) -> Tensor:
        return modules[0](x)

    return fn


def in_a_list(module: nn.Module) -> Fn:
    modules = [module]
    return lambda x: modules[0](x)


def in_a_dict(module: nn.Module) -> Fn:
    modules = {"a": {"b": module}}
    return lambda x: modules["a"]["b"](x)


def attribute(module: nn.Module) -> Fn:
    held = types.SimpleNamespace(module=module)
    return lambda x: held.module(x)


def around(inner: Fn) -> Fn:
    return lambda x: inner(x)


def nested_closures(module: nn.Module) -> Fn:
    return functools.reduce(lambda fn, _: around(fn), range(6), module)


WAYS: dict[str, Callable[[nn.Module], Fn]] = {
    "closure": around,
    "default argument": default_argument,
    "keyword's default": keyword_default,
    "list": in_a_list,
    "dict": in_a_dict,
    "attribute": attribute,
    "callable object": Calling,
    "method": lambda module: Calling(module).method,
    "six closures": nested_closures,
    "unregistered": Unregistered,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@ways
def test_a_buffer_is_written_in_forward_only(way):
    module, x = make(Counting), draw(TOKENS, HIDDEN)
    y = tile(way(module), num_shards=SHARDS)(x)
    assert (module.tokens, module.calls) == (TOKENS, SHARDS)
    y.sum().backward()
    assert (module.tokens, module.calls) == (TOKENS, SHARDS)


@ways
def test_a_switch_of_mode_between_forward_and_backward_changes_nothing(way):
    module, x = nn.Dropout(0.5), torch.ones(TOKENS, HIDDEN, requires_grad=True)
    y = tile(way(module), num_shards=SHARDS)(x)
    module.eval()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not module.training


@ways
def test_the_check_of_a_loss_for_means_writes_nothing(way):
    module, x = make(Counting), draw(TOKENS, HIDDEN)
    fn = way(module)
    tiled_loss(lambda x: fn(x).sum(), x, num_shards=SHARDS).backward()
    assert (module.tokens, module.calls) == (TOKENS, SHARDS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
def test_what_fn_compiles_stays_compiled(whole):
    """The probe runs it as it is written, so that its buffers are seen; the shards run compiled, without a warning."""
    module, x, runs = make(Counting), draw(TOKENS, HIDDEN), []

    def backend(graph: Any, _: Any) -> Fn:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    fn = torch.compile(module, backend=backend, fullgraph=whole)
    tile(fn if whole else lambda x: fn(x), num_shards=SHARDS)(x).sum().backward()
    assert len(runs) == 2 * SHARDS
    assert (module.tokens, module.calls) == (TOKENS, SHARDS)


def test_no_hook_is_left_behind():
    def broken(x: Tensor) -> Tensor:
        raise ValueError("broken")

    tile(Counting(), num_shards=2)(torch.ones(4, HIDDEN))
    with pytest.raises(ValueError, match="broken"):
        tile(broken, num_shards=2)(torch.ones(4, HIDDEN))
    assert not nn.modules.module._global_forward_pre_hooks


def counter(write: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, Fn]:
    """A plain tensor that a function writes to, and the function."""
    total = torch.zeros(HIDDEN, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            write(total, x.sum(0))
        return x.sin()

    return total, fn


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "method": lambda total, part: total.add_(part),
    "a view": lambda total, part: total[1:].add_(part[1:]),
    "out": lambda total, part: torch.add(total, part, out=total),
    "a list": lambda total, part: torch._foreach_add_([total], [part]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_plain_tensor_is_written_in_forward_only(write):
    total, fn = counter(write)
    expected, untiled = counter(write)
    x = draw(TOKENS, HIDDEN)
    y = tile(fn, num_shards=SHARDS)(x)
    for piece in x.detach().split(2):
        untiled(piece)
    assert torch.equal(total, expected)
    y.sum().backward()
    assert torch.equal(total, expected)
    assert_same(x.grad, x.detach().cos(), "gradient")


def test_statistics_of_a_functional_batch_norm_are_written_once():
    """Its schema does not say that it writes."""

    def run(split: bool) -> tuple[Tensor, Tensor]:
        mean, var, x = torch.zeros(HIDDEN).double(), torch.ones(HIDDEN).double(), draw(TOKENS, HIDDEN)

        def fn(x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x, mean, var, training=True)

        parts = [fn(piece) for piece in x.split(5)] if split else [tile(fn, num_shards=2)(x)]
        torch.cat(parts).square().sum().backward()
        return mean, var

    for found, expected in zip(run(False), run(True), strict=True):
        assert_same(found, expected, "statistics")


class Noisy(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


def _normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.randn(x.shape, generator=generator, dtype=x.dtype)


DRAWS: dict[str, Callable[[torch.Generator], Fn]] = {
    "module": Noisy,
    "lambda": lambda g: lambda x: x * torch.empty_like(x).bernoulli_(0.5, generator=g),
    "rand": lambda g: lambda x: x * torch.rand(x.shape, generator=g, dtype=x.dtype),
    "randn": lambda g: lambda x: _normal(x, g),
    "multinomial": lambda g: lambda x: x * torch.multinomial(torch.ones(x.shape), HIDDEN, generator=g),
    "randperm": lambda g: lambda x: x * torch.randperm(HIDDEN, generator=g),
    "rand_like": lambda g: lambda x: x * torch.normal(torch.ones_like(x), 1.0, generator=g),
}


@pytest.mark.parametrize("kind", DRAWS.values(), ids=DRAWS.keys())
@pytest.mark.parametrize("way", [lambda fn: fn, in_a_list], ids=["itself", "list"])
def test_an_own_generator_is_replayed(kind, way):
    """The numbers and the state after forward are those of plain calls per shard; backward draws the same, unnoticed."""
    results = []
    for tiled in (True, False):
        generator = torch.Generator().manual_seed(3)
        x, fn = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True), way(kind(generator))
        y = tile(fn, num_shards=SHARDS)(x) if tiled else torch.cat([fn(piece) for piece in x.split(2)])
        state = generator.get_state()
        if tiled:
            generator.manual_seed(9)  # backward must not depend on where it stands
        before = generator.get_state()
        y.sum().backward()
        assert torch.equal(generator.get_state(), before)
        assert torch.equal(x.grad, y.detach())
        results.append((y.detach(), state))
    assert all(map(torch.equal, *results))


def test_own_and_default_generators_together():
    own, x = torch.Generator().manual_seed(3), torch.ones(TOKENS, HIDDEN, requires_grad=True)
    dropout = nn.Dropout(0.5)
    y = tile(lambda x: dropout(x) * torch.empty_like(x).bernoulli_(0.5, generator=own), num_shards=SHARDS)(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_own_generators_in_nested_tiles():
    own, x = torch.Generator().manual_seed(3), torch.ones(TOKENS, HIDDEN, requires_grad=True)
    y = tile(tile(Noisy(own), num_shards=2), num_shards=SHARDS)(x)
    before = own.get_state()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(own.get_state(), before)

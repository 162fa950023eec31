"""`tile`: a shard's recomputation finds what fn writes as that shard's forward found it, and leaves it as forward did."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_specs import SpecError
from tests.tile.torch_checks import assert_same
from tiled_torch import tile, tiled_loss

HIDDEN, TOKENS, SHARD = 8, 20, 3
Way = Callable[[nn.Module], Callable[..., Any]]


class Replaced(nn.Module):
    """A running mean that is read and bound anew, as a buffer or as a plain attribute."""

    def __init__(self, *, buffer: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        mean = torch.ones((), dtype=torch.float64)
        self.register_buffer("mean", mean) if buffer else setattr(self, "mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + 0.1 * x.detach().abs().mean()
        return self.linear(x) / self.mean


class Written(Replaced):
    """The same, written in place."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return self.linear(x) / self.mean.clone()


class Late(Replaced):
    """Written by some shards only, never by the first tokens; in place or bound anew."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == SHARD and x.detach().sum() > 0:
            self.mean.add_(1)
        if x.shape[0] == SHARD and x.detach().sum() < 0:
            self.mean = self.mean * 0.5
        return self.linear(x) / self.mean.clone()


class Steps(nn.Module):
    """A Python number that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(HIDDEN, HIDDEN), 1

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) * self.steps


class Balanced(nn.Module):
    """DeepSeek's load balancing: the bias of an expert falls where it was chosen too often."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, places = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, chosen[rows, places], None])
        load = torch.bincount(chosen.flatten(), minlength=4).double()
        if torch.is_grad_enabled():  # as Megatron does, so that its own recomputation does not count twice
            with torch.no_grad():
                self.bias += 0.3 * torch.sign(load.mean() - load)
        return y


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))


def nested() -> nn.Module:
    return nn.Sequential(Replaced(), nn.Sequential(nn.BatchNorm1d(HIDDEN), Written(), nn.Dropout(0.5)))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "bound anew": Replaced,
    "in place": Written,
    "attribute": lambda: Replaced(buffer=False),
    "by later shards": Late,
    "number": Steps,
    "balancing bias": Balanced,
    "spectral norm": spectral,
    "nested": nested,
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
WAYS: dict[str, Way] = {"itself": lambda m: m, "closure": lambda m: lambda x: m(x)}


def make(kind: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind().double()


def draw(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (5 * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)).requires_grad_()


def by_shards(module: nn.Module, x: Tensor, tokens: int) -> Tensor:
    return torch.cat([module(piece) for piece in x.split(tokens)])


def held(module: nn.Module) -> list[Any]:
    """Buffers and what else the modules above change."""
    others = [getattr(part, name, None) for part in module.modules() for name in ("mean", "steps")]
    return [torch.as_tensor(value, dtype=torch.float64) for value in (*module.buffers(), *others) if value is not None]


def assert_as_by_shards(found: Any, expected: Any, what: str) -> None:
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e, what)


@kinds
@pytest.mark.parametrize("tokens", [TOKENS, SHARD], ids=["one shard", "shards"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_backward_starts_from_the_buffers_that_each_shard_found(kind, tokens, way):
    """Two calls before one backward: results, gradients and what stands in the modules after forward and after backward."""
    runs = []
    for tiled in (True, False):
        module, x = make(kind), draw()
        torch.manual_seed(5)
        if tiled:
            fn = tile(way(module), num_shards=-(-TOKENS // tokens))
        else:
            fn = lambda x, module=module: by_shards(module, x, tokens)  # noqa: E731
        y = fn(x).square().sum() + fn(x.flip(0)).sin().sum()
        after = copy.deepcopy([h.detach() for h in held(module)])
        wanted = [x, *module.parameters()]
        gradients = torch.autograd.grad(y, wanted, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(y, wanted, allow_unused=True)
        runs.append((gradients, after))
        assert_as_by_shards(again, gradients, "second backward")
        assert_as_by_shards([h.detach() for h in held(module)], after, "state after backward")
    assert_as_by_shards(runs[0][0], runs[1][0], "gradient")
    assert_as_by_shards(runs[0][1], runs[1][1], "state")


@pytest.mark.parametrize("reentrant", [True, False])
def test_buffers_under_checkpointing(reentrant):
    """The replay of a non-reentrant checkpoint writes no buffer again; a reentrant one does, as it does around any module."""
    module, plain, x = make(Written), make(Written), draw()
    checkpoint(tile(module, num_shards=7), x, use_reentrant=reentrant).sum().backward()
    found, x.grad = x.grad, None
    for _ in range(2 if reentrant else 1):
        y = by_shards(plain, x, SHARD)
    y.sum().backward()
    assert_same(found, x.grad, "gradient of x")
    assert_same(module.linear.weight.grad, plain.linear.weight.grad, "gradient")
    assert_same(module.mean, plain.mean, "buffer")


def test_a_switch_to_eval_between_forward_and_backward_keeps_batch_statistics():
    """Batch norm in eval mode, and a forward in train mode before backward, which writes without a new version."""
    module, x = make(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN))), draw()
    module.eval()
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    y = tile(module, num_shards=3)(x).square().sum()
    module.train()(draw(1) * 9)
    after = module[1].running_mean.clone()
    assert_as_by_shards(torch.autograd.grad(y, list(module.parameters())), expected, "gradient")
    assert torch.equal(module[1].running_mean, after)


def test_a_large_buffer_is_copied_once():
    """Beyond 64 KiB the recomputed shards write it again, in order."""
    module = make(Written)
    module.register_buffer("mean", torch.ones(2**14, dtype=torch.float64))
    module.forward = lambda x: (
        module.mean.mul_(0.9).add_(x.detach().mean()),
        module.linear(x) / module.mean[0].clone(),
    )[1]
    plain = copy.deepcopy(module)
    plain.forward = lambda x: (plain.mean.mul_(0.9).add_(x.detach().mean()), plain.linear(x) / plain.mean[0].clone())[1]
    x = draw()
    tiled, expected = tile(module, num_shards=7)(x), by_shards(plain, x, SHARD)
    frames = tiled.grad_fn.next_functions[0][0].call.state.frames
    assert [len(frame.copies) for frame in frames] == [1, *[0] * 6]
    tiled.sum().backward()
    expected.sum().backward()
    assert_same(module.linear.weight.grad, plain.linear.weight.grad, "gradient")
    assert_same(module.mean, plain.mean, "buffer")


def test_a_write_that_only_a_later_shard_makes_is_refused():
    """Where it cannot be undone: a tensor of a closure, or one too large to be copied on suspicion."""
    total, x = torch.zeros(HIDDEN, dtype=torch.float64), draw()

    def fn(x: Tensor) -> Tensor:
        if len(x) == SHARD:
            total.add_(1)
        return x * 2 + total

    message = r"^tile: only a later shard of fn wrote a tensor of shape \[8\]"
    with pytest.raises(SpecError, match=message):
        tile(fn, num_shards=7)(x)


def test_a_gradient_that_leaves_through_a_written_tensor_is_refused():
    """Forward keeps no graph, so what fn writes outside would have no history."""
    kept, x = torch.zeros(HIDDEN, dtype=torch.float64), draw()

    def fn(x: Tensor) -> Tensor:
        kept.add_(x.sum(0))
        return x * 2

    with pytest.raises(SpecError, match=r"^tile: a tensor that fn writes must be given values without a gradient"):
        tile(fn, num_shards=2)(x)
    assert not kept.requires_grad
    assert not kept.any()


def test_a_loss_with_a_running_mean():
    """`tiled_loss` as `tile`; its look for means leaves nothing behind."""
    module, plain, x = make(Written), make(Written), draw()
    tiled_loss(lambda x: module(x).square().sum(), x, num_shards=7).backward()
    by_shards(plain, x, SHARD).square().sum().backward()
    assert_same(module.linear.weight.grad, plain.linear.weight.grad, "gradient")
    assert_same(module.mean, plain.mean, "buffer")

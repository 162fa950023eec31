"""`tile` recomputes every shard as forward computed it, and leaves no trace of the probe or of the recomputation."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_specs import Tiling, tolerances
from shared_specs.core.rounding import relative_error
from tests.adapters import ADAPTERS
from tests.asserting import assert_within
from tests.core.torch_counting import LiveBytes, saved_bytes
from tests.tile.torch_checks import HIDDEN, Counting, draw
from tiled_torch import tile

TOKENS = 10


def mlp(*between: nn.Module) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(HIDDEN, 12), nn.SiLU(), *between, nn.Linear(12, HIDDEN)).double()


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    to_numpy = ADAPTERS["torch"].to_numpy
    assert_within(to_numpy(found), to_numpy(expected), tolerances.DISTRIBUTED_FLOAT64, what)


def shard_by_shard(module: nn.Module, x: Tensor, shard_tokens: int) -> Tensor:
    """Plain autograd over the same shards: what random numbers and buffers should do."""
    return torch.cat([module(piece) for piece in x.split(shard_tokens)])


def test_dropout_draws_the_same_numbers_in_recomputation():
    """Equal to plain autograd over the same shards and the same seed, every shard with a mask of its own."""
    module, x = mlp(nn.Dropout(0.5)), draw(TOKENS, HIDDEN)
    results = []
    for fn in (tile(module, num_shards=5), lambda x: shard_by_shard(module, x, 2)):
        torch.manual_seed(11)
        y = fn(x)
        after = torch.get_rng_state()
        torch.manual_seed(12)  # backward must not depend on where the generator stands
        gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        results.append((y, *gradients, after, torch.get_rng_state()))
    for found, expected in zip(*results, strict=True):
        if found.dtype == torch.uint8:
            assert torch.equal(found, expected), "the generator stands elsewhere than after the untiled module"
        else:
            assert_close(found.detach(), expected.detach(), "dropout")
    same = tile(nn.Dropout(0.5), num_shards=2)(torch.ones(2, 64))
    assert not torch.equal(same[0], same[1])


def test_dropout_gradient_is_the_slope_of_the_function():
    """Central differences along random directions, with the seed reset before each forward."""
    module, x = mlp(nn.Dropout(0.5)), draw(TOKENS, HIDDEN)
    tiled = tile(module, num_shards=5)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return tiled(x)

    assert torch.autograd.gradcheck(seeded, (x,), fast_mode=True)


def assert_as_accurate(found: Iterable[Tensor], untiled: Iterable[Tensor], truth: Iterable[Tensor]) -> None:
    """In the untiled dtype, and no further from float64 than the untiled gradients in bfloat16 allow."""
    for f, u, t in zip(found, untiled, truth, strict=True):
        assert f.dtype == u.dtype
        f64, u64, t64 = (tensor.double().numpy() for tensor in (f, u, t))
        assert_within(f64, t64, tolerances.limit(relative_error(u64, t64), "bfloat16"), "gradient under autocast")


@pytest.mark.parametrize(
    ("given", "weights"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cached", [True, False])
def test_autocast_is_as_in_forward(given, weights, inside, cached):
    """The dtypes inside recomputation, outside autocast or still in it; gradients come in the dtypes of x and weights."""
    module = mlp().to(getattr(torch, weights))
    x = draw(TOKENS, HIDDEN).detach().to(getattr(torch, given)).requires_grad_()
    exact = copy.deepcopy(module).double()
    seen = []
    module[1].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    results = []
    for fn in (tile(module, num_shards=5), module):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            y = fn(x).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached, enabled=inside):
            results.append(torch.autograd.grad(y.sum(), [x, *module.parameters()]))
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    truth = torch.autograd.grad(exact(x.double()).sum(), [x, *exact.parameters()])
    assert_as_accurate(results[0], results[1], truth)


def test_autocast_cache_is_neither_read_nor_left_behind():
    """The same weight outside, before and after, in one autocast region: each use gets its gradient."""
    module, x = mlp().float(), draw(TOKENS, HIDDEN).detach().float()
    exact = copy.deepcopy(module).double()
    results = []
    for inner in (tile(module, num_shards=5), module):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(inner(module(x))).float().sum()
        results.append(torch.autograd.grad(loss, list(module.parameters())))
    truth = torch.autograd.grad(exact(exact(exact(x.double()))).sum(), list(exact.parameters()))
    assert_as_accurate(results[0], results[1], truth)


@pytest.mark.parametrize("closure", [False, True])
def test_a_buffer_is_written_in_forward_only(closure):
    """By the shards, not by the probe, and not again in backward; also behind a function's closure."""
    module, x = Counting().double(), draw(TOKENS, HIDDEN)
    y = tile((lambda x: module(x)) if closure else module, num_shards=5)(x)
    assert (module.tokens, module.calls) == (TOKENS, 5)
    y.sum().backward()
    assert (module.tokens, module.calls) == (TOKENS, 5)


def test_batch_statistics_are_updated_once_per_shard():
    norm: Any = nn.BatchNorm1d(HIDDEN).double()
    x = draw(TOKENS, HIDDEN)
    tile(norm, num_shards=2)(x).sum().backward()
    found = (norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked))
    norm.reset_running_stats()
    shard_by_shard(norm, x, 5)
    assert_close(found[0], norm.running_mean, "mean")
    assert_close(found[1], norm.running_var, "variance")
    assert found[2] == norm.num_batches_tracked == 2


def test_a_switch_of_mode_between_forward_and_backward_changes_nothing():
    module, x = mlp(nn.Dropout(0.5)), draw(TOKENS, HIDDEN)
    torch.manual_seed(1)
    y = tile(module, num_shards=5)(x)
    module.eval()
    (found,) = torch.autograd.grad(y.sum(), [x])
    assert not module[2].training
    module.train()
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(shard_by_shard(module, x, 2).sum(), [x])
    assert_close(found, expected, "gradient")


class Rows:
    """Counts the rows that a module computes."""

    def __init__(self, module: nn.Module) -> None:
        self.rows: list[int] = []
        module.register_forward_pre_hook(lambda _, args: self.rows.append(args[0].shape[0]))

    def take(self) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


def test_each_shard_is_computed_once_and_recomputed_once():
    module, x = mlp(), draw(TOKENS, HIDDEN)
    rows, tiled = Rows(module), tile(module, num_shards=3)
    y = tiled(x)
    assert rows.take() == [2, 4, 4, 2]  # the probe, then the shards
    y.sum().backward()
    assert rows.take() == [4, 4, 2]
    with torch.no_grad():
        tiled(x)
    assert rows.take() == [4, 4, 2]


def test_non_reentrant_checkpointing_does_not_replay_the_loop():
    module, before, x = mlp(), nn.Linear(HIDDEN, HIDDEN).double(), draw(TOKENS, HIDDEN)
    rows, tiled = Rows(module), tile(module, num_shards=3)
    y = checkpoint(lambda x: x + tiled(before(x)), x, use_reentrant=False)
    assert rows.take() == [2, 4, 4, 2]
    wanted = [x, *before.parameters(), *module.parameters()]
    found = torch.autograd.grad(y.square().sum(), wanted)
    assert rows.take() == [2, 4, 4, 2]  # the replay's probe, then the recomputation: no second forward
    expected = torch.autograd.grad((x + module(before(x))).square().sum(), wanted)
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, "checkpointed")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_checkpointing_around(reentrant, last):
    """Several results, dropout, and something saved after the loop, with both kinds of checkpoint."""
    module, head, x = mlp(nn.Dropout(0.5)), nn.Linear(HIDDEN, HIDDEN).double(), draw(2, 5, HIDDEN)

    def region(tiled: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            hidden, stats = tiled(torch.tanh(x))
            return hidden + stats if last else head(hidden).tanh() * stats

        return run

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = module(x)
        return y, y.square().sum(-1, keepdim=True)

    def shards(x: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [fn(piece) for piece in x.reshape(1, -1, HIDDEN).split(2, 1)]
        return tuple(torch.cat(part, 1).view(2, 5, -1) for part in zip(*pieces, strict=True))  # type: ignore[return-value]

    wanted = [x, *module.parameters()]
    results = []
    for tiled, outer in ((tile(fn, num_shards=5), True), (shards, False)):
        torch.manual_seed(5)
        run = region(tiled)
        y = checkpoint(run, x, use_reentrant=reentrant) if outer else run(x)
        for tensor in wanted:
            tensor.grad = None
        y.square().sum().backward()
        results.append([tensor.grad for tensor in wanted])
    for f, e in zip(*results, strict=True):
        assert_close(f, e, "checkpointed")


@pytest.mark.parametrize("inner", ["checkpoint", "tile"])
def test_recomputation_inside_recomputation(inner):
    module, x = mlp(nn.Dropout(0.5)), draw(TOKENS, HIDDEN)
    fn = tile(module, num_shards=2) if inner == "tile" else lambda x: checkpoint(module, x, use_reentrant=False)
    results = []
    for run in (tile(fn, num_shards=5), lambda x: torch.cat([fn(piece) for piece in x.split(2)])):
        torch.manual_seed(11)
        results.append(torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]))
    for f, e in zip(*results, strict=True):
        assert_close(f, e, "nested")


def test_peak_bytes_do_not_grow_with_tokens():
    """Above the result and the gradients of x, which are [T, H]: what fn needs for one shard and the sums."""

    def peak(tokens: int) -> int:
        module, x = mlp(), draw(tokens, HIDDEN)
        with LiveBytes() as live:
            dy = torch.ones(tokens, HIDDEN, dtype=torch.float64)
            torch.autograd.grad(tile(module, tiling=Tiling(shard_tokens=64))(x), [x, *module.parameters()], dy)
        return live.peak - 2 * x.nbytes - dy.nbytes

    assert peak(256) == peak(1024)


def test_only_the_arguments_are_kept():
    module, x = mlp(), draw(64, HIDDEN)
    mask = torch.ones(64, dtype=torch.bool)
    tiled = tile(lambda x, mask: module(x) * mask.unsqueeze(-1), num_shards=8)
    y, kept = saved_bytes(lambda: tiled(x, mask), exclude=[])
    assert kept == x.nbytes + mask.nbytes
    assert y.requires_grad


def test_second_order_is_refused_with_the_way_out():
    module, x = mlp(), draw(TOKENS, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"^tile: create_graph must be False .* differentiate fn itself"):
        torch.autograd.grad(tile(module, num_shards=3)(x).sum(), x, create_graph=True)


def test_a_second_backward_needs_retain_graph():
    module, x = mlp(), draw(TOKENS, HIDDEN)
    y = tile(module, num_shards=3)(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_a_parameter_written_before_backward_is_an_error():
    module, x = mlp(), draw(TOKENS, HIDDEN)
    y = tile(module, num_shards=3)(x).sum()
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(
        RuntimeError,
        match=r"^tile: one of the variables .* modified by an inplace operation: .* shape \[12, 6\] .* version",
    ):
        y.backward()


def test_torch_func_is_refused():
    module = mlp()
    with pytest.raises(NotImplementedError, match=r"^tile: this call is inside torch.func"):
        torch.func.grad(lambda x: tile(module, num_shards=3)(x).sum())(draw(TOKENS, HIDDEN, grad=False))


# The compiler asks every tensor for .grad and hides the warning about that, which fails where warnings are errors.
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_code_around_may_be_compiled():
    """torch.compile leaves a tiled call as it is: a break in the graph, the same numbers."""
    module, x = mlp(), draw(TOKENS, HIDDEN)
    tiled = tile(module, num_shards=3)
    compiled = torch.compile(lambda x: tiled(x * 2) + 1, backend="eager")
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *module.parameters()])
    expected = torch.autograd.grad((module(x * 2) + 1).square().sum(), [x, *module.parameters()])
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, "compiled around")

"""`tiled_loss`: any loss of hidden states, against the same function of all tokens at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import LiveBytes
from tests.plans.ranks_torch_model import LoRALinear
from tiled_torch import tiled_loss

HIDDEN, VOCAB = 6, 11


def error(a: Tensor, b: Tensor) -> float:
    return relative_error(a.detach().double().numpy(), b.detach().double().numpy())


def draw(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def labels(*dims: int) -> Tensor:
    """Ignored where a prompt would be, and here and there: never in the first two tokens only."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(VOCAB, dims, generator=generator)
    flat = targets.view(-1)
    flat[flat.numel() // 3 : flat.numel() // 2] = -100
    flat[3::5] = -100
    return targets


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return loss, (targets != -100).sum()


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self, linear: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCAB) if linear is None else linear
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return sum_and_count(self.linear(self.dropout(x)), targets)


def make_head(**arguments: Any) -> Head:
    torch.manual_seed(3)
    return Head(**arguments).double()


def trainable(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def assert_equal_to_untiled(
    fn: Callable[..., Any], args: tuple[Any, ...], wanted: list[Tensor], upstream: float = 1.0, **tiling: Any
) -> None:
    """Every result and the gradients of the sum of the differentiable ones, each with a weight of its own."""
    found, expected = pytree.tree_leaves(tiled_loss(fn, *args, **tiling)), pytree.tree_leaves(fn(*args))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert (ours.shape, ours.requires_grad) == (theirs.shape, theirs.requires_grad)
            assert ours.is_floating_point() == theirs.is_floating_point()
            assert error(ours, theirs) <= DISTRIBUTED_FLOAT64
    grads = []
    for results in (found, expected):
        parts = [(i + 1) * r.square().sum() for i, r in enumerate(results) if r is not None and r.requires_grad]
        grads.append(torch.autograd.grad(upstream * torch.stack(parts).sum(), wanted))
    assert all(error(ours, theirs) <= DISTRIBUTED_FLOAT64 for ours, theirs in zip(*grads, strict=True))


@pytest.mark.parametrize("upstream", [1.0, 0.125, -3.0, 65536.0])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("dims", [(17,), (2, 9), (1, 5), (2, 3, 4)], ids=str)
def test_cross_entropy_by_hand(dims: tuple[int, ...], num_shards: int, upstream: float) -> None:
    """Mean over the valid tokens from a sum and a count: uneven shards, ignored labels, any upstream gradient."""
    head, x, targets = make_head(), draw(*dims, HIDDEN), labels(*dims)
    wanted = [x, *head.parameters()]
    total, count = tiled_loss(head, x, targets, num_shards=num_shards)
    assert int(count) == int((targets != -100).sum())
    expected = F.cross_entropy(head.linear(x).flatten(0, -2), targets.flatten())
    assert error(total / count, expected) <= DISTRIBUTED_FLOAT64
    found = torch.autograd.grad(upstream * total / count, wanted)
    for ours, theirs in zip(found, torch.autograd.grad(upstream * expected, wanted), strict=True):
        assert error(ours, theirs) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("num_shards", [1, 4])
def test_gradients_appear_in_backward_only(num_shards: int) -> None:
    """And add up over two losses, each parameter's hook once per backward."""
    head, x, targets = make_head(), draw(2, 9, HIDDEN), labels(2, 9)
    fired: list[int] = []
    head.linear.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    total, _ = tiled_loss(head, x, targets, num_shards=num_shards)
    assert all(leaf.grad is None for leaf in (x, *head.parameters()))
    (total / 2).backward()
    tiled_loss(head, x, targets, num_shards=num_shards)[0].backward()
    expected = torch.autograd.grad(1.5 * head(x, targets)[0], [x, *head.parameters()])
    assert len(fired) == 2
    for leaf, grad in zip((x, *head.parameters()), expected, strict=True):
        assert error(leaf.grad, grad) <= DISTRIBUTED_FLOAT64


def test_a_graph_can_be_walked_twice() -> None:
    head, x, targets = make_head(), draw(2, 9, HIDDEN), labels(2, 9)
    total, _ = tiled_loss(head, x, targets, num_shards=4)
    first, second = (torch.autograd.grad(total, [x, head.linear.weight], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("x_grad", [True, False])
def test_a_closure(x_grad: bool) -> None:
    """Over leaves that are no module's parameters; x may need no gradient."""
    weight, scale, targets = draw(VOCAB, HIDDEN, seed=5), draw(seed=6), labels(2, 9)

    def fn(x: Tensor, targets: Tensor) -> Tensor:
        return sum_and_count(scale * (x @ weight.T), targets)[0]

    x = draw(2, 9, HIDDEN, grad=x_grad)
    assert_equal_to_untiled(fn, (x, targets), [weight, scale, *([x] if x_grad else [])], num_shards=5)


def test_a_lora_head() -> None:
    """The frozen base gets no gradient, the adapter gets its own."""
    torch.manual_seed(0)
    head = make_head(linear=LoRALinear(nn.Linear(HIDDEN, VOCAB)))
    x, targets = draw(2, 9, HIDDEN), labels(2, 9)
    assert len(trainable(head)) == 2
    assert_equal_to_untiled(head, (x, targets), [x, *trainable(head)], num_shards=4)
    tiled_loss(head, x, targets, num_shards=4)[0].backward()
    assert [p.grad is not None for p in head.parameters()] == [p.requires_grad for p in head.parameters()]


def test_dropout_is_recomputed_with_the_same_masks() -> None:
    """The gradient is that of the value that forward returned: central differences with the seed set again."""
    head, x, targets = make_head(dropout=0.4), draw(1, 7, HIDDEN), labels(1, 7)

    def at(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return tiled_loss(head, x, targets, num_shards=5)[0]

    assert torch.autograd.gradcheck(at, (x,), fast_mode=False)
    assert (torch.autograd.grad(at(x), [x])[0] == 0).any(), "nothing was dropped"


def test_a_call_draws_only_what_its_shards_draw() -> None:
    """The check of the first tokens leaves neither random numbers nor buffers behind."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(x, 0.5).sum()

    module, x = Counting(), draw(12, HIDDEN)
    torch.manual_seed(2)
    tiled_loss(module, x, num_shards=3).backward()
    after = torch.rand(1)
    assert int(module.calls) == 3
    torch.manual_seed(2)
    for _ in range(3):
        F.dropout(torch.ones(4, HIDDEN, dtype=torch.float64), 0.5)
    assert torch.equal(torch.rand(1), after)


def test_rows_are_cut_and_parameters_stay_whole() -> None:
    """Arguments with x's leading dims are cut; a parameter is not, even where its shape says so; nor is the rest."""
    x, advantages = draw(4, 6, HIDDEN), draw(4, 6, seed=2)
    table = nn.Parameter(draw(4, 6, seed=3).detach())
    seen: list[tuple[Any, ...]] = []

    def fn(x: Tensor, advantages: Tensor, table: Tensor, scale: float, extra: dict[str, Any]) -> Tensor:
        seen.append((tuple(x.shape), tuple(advantages.shape), tuple(table.shape), tuple(extra["mask"].shape)))
        return scale * (x.sum(-1) * advantages * extra["mask"]).sum() * table.square().sum()

    mask = (torch.arange(24).view(4, 6) % 3).double()
    args = (x, advantages, table, 2.0, {"mask": mask})
    assert_equal_to_untiled(fn, args, [x, advantages, table], num_shards=5)
    shards = {shapes for shapes in seen if shapes[0][1] == 5}
    assert shards == {((1, 5, HIDDEN), (1, 5), (4, 6), (1, 5))}


def test_nested_results_and_values_per_token() -> None:
    """Scalars of any kind beside values and rows per token, None, and a result without a gradient."""
    weight, x, targets = draw(VOCAB, HIDDEN, seed=5), draw(2, 9, HIDDEN), labels(2, 9)

    def fn(x: Tensor, targets: Tensor) -> Any:
        log_p = F.log_softmax(x @ weight.T, -1)
        picked = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        valid = targets != -100
        sums = {"loss": -(picked * valid).sum(), "valid": valid.sum(), "lse": x.logsumexp(-1).sum().detach()}
        return sums, [picked, (log_p[..., :3], None)], (log_p.argmax(-1) == targets).sum(), log_p.argmax(-1)

    assert_equal_to_untiled(fn, (x, targets), [x, weight], num_shards=5)
    found: Any = tiled_loss(fn, x, targets, num_shards=5)
    assert (found[0]["valid"].dtype, found[2].dtype, found[3].dtype) == (torch.int64,) * 3
    assert (found[1][0].shape, found[1][1][0].shape) == ((2, 9), (2, 9, 3))


def test_a_sequence_reward() -> None:
    """Policy gradients: per-token log-probabilities come back, and the loss of whole sequences is built on them."""
    weight, x, targets = draw(VOCAB, HIDDEN, seed=5), draw(3, 7, HIDDEN), labels(3, 7)
    rewards = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)

    def log_probs(x: Tensor, targets: Tensor) -> Tensor:
        logits = x @ weight.T
        return -F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)

    def objective(log_probs: Tensor) -> Tensor:
        return -(rewards * log_probs.sum(-1).exp()).mean()

    found = torch.autograd.grad(objective(tiled_loss(log_probs, x, targets, num_shards=4)), [x, weight])
    expected = torch.autograd.grad(objective(log_probs(x, targets)), [x, weight])
    assert all(error(a, b) <= DISTRIBUTED_FLOAT64 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dims", [(0,), (2, 0), (1,), (1, 1)], ids=str)
def test_no_token_and_one_token(dims: tuple[int, ...]) -> None:
    """Sums of nothing are zero, and so are the gradients: none is missing."""
    head, x, targets = make_head(), draw(*dims, HIDDEN), labels(*dims).fill_(4)
    assert_equal_to_untiled(head, (x, targets), [x, *head.parameters()], num_shards=4)
    total, count = tiled_loss(head, x, targets, num_shards=4)
    total.backward()
    assert int(count) == targets.numel()
    assert all(leaf.grad is not None for leaf in (x, *head.parameters()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    head, x, targets = make_head(), draw(2, 9, HIDDEN), labels(2, 9)
    with mode():
        total, count = tiled_loss(head, x, targets, num_shards=4)
    assert not total.requires_grad
    expected = head(x, targets)
    assert error(total, expected[0]) <= DISTRIBUTED_FLOAT64
    assert int(count) == int(expected[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant: bool) -> None:
    head, x, targets = make_head(dropout=0.4), draw(2, 9, HIDDEN), labels(2, 9)

    def block(x: Tensor) -> Tensor:
        total, count = tiled_loss(head, F.layer_norm(x, (HIDDEN,)), targets, num_shards=4)
        return total / count

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        for leaf in (x, *head.parameters()):
            leaf.grad = None
        call(x).backward()
        return tuple(leaf.grad for leaf in (x, *head.parameters()))

    found = run(lambda x: checkpoint(block, x, use_reentrant=reentrant))  # type: ignore[arg-type, return-value]
    assert all(error(a, b) <= DISTRIBUTED_FLOAT64 for a, b in zip(found, run(block), strict=True))


def test_autocast() -> None:
    """bfloat16 logits, sums in float32, gradients in the weights' dtype; the weight keeps its graph for others."""
    head = make_head().float()
    x, targets = draw(64, HIDDEN).detach().float().requires_grad_(), labels(64)
    wide, truth = make_head(), x.detach().double().requires_grad_()
    exact = torch.autograd.grad(wide(truth, targets)[0], [truth, *wide.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = tiled_loss(head, x, targets, num_shards=8)
        reference, _ = head(x, targets)
    assert total.dtype == torch.float32
    found, theirs = (torch.autograd.grad(loss, [x, *head.parameters()]) for loss in (total, reference))
    for ours, plain, exactly in zip(found, theirs, exact, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, exactly) <= limit(error(plain, exactly), "bfloat16")


def test_sums_are_wide() -> None:
    """2048 shards that each return 1 in bfloat16, where a bfloat16 sum would stop at 256."""
    x = torch.ones(2048, 1, dtype=torch.bfloat16)
    total = tiled_loss(lambda x: x.sum(), x, num_shards=2048)
    assert (total.dtype, total.item()) == (torch.float32, 2048.0)


def test_one_shard_of_logits_exists() -> None:
    weight, x, targets = draw(512, HIDDEN, seed=5).detach(), draw(256, HIDDEN), labels(256)
    weight.requires_grad_()
    with LiveBytes() as live:
        total, _ = tiled_loss(lambda x, y: sum_and_count(x @ weight.T, y), x, targets, num_shards=16)
        total.backward()
    assert live.largest == max(weight.numel(), 256 // 16 * 512) * 8

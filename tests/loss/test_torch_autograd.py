"""The autograd contract of the PyTorch loss: gradcheck, upstream gradients, graphs, autocast, checkpointing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs import LossOptions, LossResult, Tiling, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.loss.test_torch_exact import head, total
from tiled_torch import tiled_linear_cross_entropy

MEAN, SUM, NONE = (LossOptions(reduction=reduction) for reduction in ("mean", "sum", "none"))
REDUCED = pytest.mark.parametrize("loss", [MEAN, SUM, NONE], ids=["mean", "sum", "none"])
OUTPUTS = ("log_probs", "lse", "entropy")


def error(a: Tensor, b: Tensor) -> float:
    return relative_error(a.detach().double().numpy(), b.detach().double().numpy())


def plain(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Untiled; [*tokens] without a reduction."""
    flat = F.linear(x, weight, bias).flatten(0, -2)
    losses = F.cross_entropy(flat, targets.flatten().long(), reduction=reduction)
    return losses.view(targets.shape) if reduction == "none" else losses


def assert_same(found: Any, expected: Any, allowed: float = DISTRIBUTED_FLOAT64) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) <= allowed


def leaves_of(T: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and targets."""
    x, weight, bias, targets = head(T)
    return (*(a.detach().to(dtype).requires_grad_() for a in (x, weight, bias)), targets)  # type: ignore[return-value]


GRADCHECKS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "softcap": {"logit_softcap": 1.5, "logit_scale": 0.7},
    "z_loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.3},
    "class_weight": {"class_weight": True, "label_smoothing": 0.2},
    "num_valid": {"num_valid": torch.tensor(7)},
    "log_probs": {"outputs": ("log_probs",)},
    "lse": {"outputs": ("lse",)},
    "entropy": {"outputs": ("entropy",), "logit_softcap": 2.0},
    "everything": {
        "outputs": OUTPUTS,
        "class_weight": True,
        "label_smoothing": 0.2,
        "z_loss": 0.1,
        "reduction": "none",
    },
}


@pytest.mark.deep_but(8)
@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name: str, vocab_shards: int) -> None:
    torch.manual_seed(1)
    fields = dict(GRADCHECKS[name])
    if "class_weight" in fields:
        fields["class_weight"] = torch.rand(5, dtype=torch.float64) + 0.5
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (5,)))
    targets = torch.tensor([[0, -100, 4], [2, 2, 1]])
    tiling = Tiling(num_shards=4, vocab_shards=vocab_shards)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        result = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=LossOptions(**fields), tiling=tiling)
        parts = result if isinstance(result, LossResult) else (result,)
        return tuple(part for part in parts if part is not None)

    assert torch.autograd.gradcheck(call, (x, weight, bias), fast_mode=False)


@pytest.mark.parametrize(
    "upstream",
    [lambda loss: 2 * loss, lambda loss: loss / 8, lambda loss: loss**2, lambda loss: loss + 3 * loss, torch.neg],
    ids=["2x", "accumulation", "square", "twice", "negative"],
)
@REDUCED
def test_every_gradient_takes_the_upstream_gradient(loss: LossOptions, upstream: Callable[[Tensor], Tensor]) -> None:
    """The weight's too, which is where others forget it."""
    x, weight, bias, targets = leaves_of()
    ours = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5)
    theirs = plain(x, weight, targets, bias, loss.reduction)
    found, expected = (torch.autograd.grad(upstream(value).sum(), [x, weight, bias]) for value in (ours, theirs))
    assert_same(found, expected)


@REDUCED
def test_float16_under_a_loss_scaler(loss: LossOptions) -> None:
    """Gradients of 65536 times the loss are no worse than the untiled ones, and none is lost."""
    x, weight, _, targets = head(64, torch.float16)
    scale = 65536.0 if loss is MEAN else 1024.0
    truth = [a.detach().double().requires_grad_() for a in (x, weight)]
    exact = torch.autograd.grad(scale * plain(*truth, targets, reduction=loss.reduction).sum(), truth)
    logits = F.linear(x, weight).float()
    untiled = torch.autograd.grad(scale * F.cross_entropy(logits, targets, reduction=loss.reduction).sum(), [x, weight])
    value = tiled_linear_cross_entropy(x, weight, targets, loss=loss, num_shards=4)
    tiled = torch.autograd.grad(scale * value.sum(), [x, weight])
    for ours, theirs, truth_ in zip(tiled, untiled, exact, strict=True):
        assert ours.dtype == torch.float16
        assert error(ours, truth_) <= limit(error(theirs, truth_), "float16")


def test_a_float16_mean_has_the_same_gradients_at_any_power_of_two_of_its_class_weights() -> None:
    x, weight, _, targets = head(64, torch.float16)
    classes, found = torch.linspace(0.5, 2.0, weight.shape[0]), []
    for scale in (1.0, 2.0**-40, 2.0**20):
        value = tiled_linear_cross_entropy(
            x, weight, targets, loss=LossOptions(class_weight=scale * classes), num_shards=4
        )
        found.append(torch.autograd.grad(value, [x, weight]))
    for odd in found[1:]:
        assert all(a.any() and torch.equal(a, b) for a, b in zip(odd, found[0], strict=True))


def test_small_upstream_gradients_of_float16_losses_are_not_lost_in_the_logits() -> None:
    """2^-20 times the gradient of the weight, whose operands are large, is that of 2^-20 times the loss."""
    x, weight, _, targets = head(64, torch.float16)
    x, weight = x.detach() * 2.0**10, (weight.detach() * 2.0**-10).requires_grad_()
    value = tiled_linear_cross_entropy(x, weight, targets, loss=NONE, num_shards=4).sum()
    (whole,) = torch.autograd.grad(value, weight, retain_graph=True)
    (small,) = torch.autograd.grad(2.0**-20 * value, weight)
    assert error(small, 2.0**-20 * whole.float()) <= limit(0.0, "float16")


@REDUCED
def test_a_graph_can_be_walked_twice(loss: LossOptions) -> None:
    """The same gradients again, which add up; the first ones are not written over."""
    x, weight, bias, targets = leaves_of()
    operands = [x, weight, bias]
    value = 3 * tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()
    first = torch.autograd.grad(value, operands, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(value, operands, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(second, copies, strict=True))
    for _ in range(2):
        value.backward(retain_graph=True)
    assert_same([leaf.grad for leaf in operands], [2 * grad for grad in copies])


@REDUCED
def test_gradients_are_bit_stable(loss: LossOptions) -> None:
    x, weight, bias, targets = head(96)

    def run() -> tuple[Tensor, ...]:
        value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()
        return torch.autograd.grad(value, [x, weight, bias])

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_output_alone_has_gradients(name: str, reduction: Any) -> None:
    """The loss itself unused."""
    x, weight, bias, targets = leaves_of()
    upstream = torch.randn(24, dtype=torch.float64)
    options = LossOptions(outputs=(name, "accuracy"), reduction=reduction)
    result: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=options, num_shards=5)
    found = torch.autograd.grad(getattr(result, name), [x, weight, bias], upstream)
    log_p = F.log_softmax(F.linear(x, weight, bias), -1)
    expected = {
        "log_probs": -F.nll_loss(log_p, targets, reduction="none"),
        "lse": F.linear(x, weight, bias).logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }[name]
    assert error(getattr(result, name), expected) <= DISTRIBUTED_FLOAT64
    assert_same(found, torch.autograd.grad(expected, [x, weight, bias], upstream))
    assert not result.accuracy.requires_grad
    others = [part for part in OUTPUTS if part != name]
    assert [getattr(result, part) for part in others] == [None, None]


@REDUCED
def test_autograd_grad_of_some_leaves_the_rest_alone(loss: LossOptions) -> None:
    x, weight, bias, targets = leaves_of()
    expected = torch.autograd.grad(plain(x, weight, targets, bias, loss.reduction).sum(), [x, weight, bias])
    for number, leaf in enumerate((x, weight, bias)):
        value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()
        (found,) = torch.autograd.grad(value, [leaf])
        assert error(found, expected[number]) <= DISTRIBUTED_FLOAT64
    assert [leaf.grad for leaf in (x, weight, bias)] == [None] * 3


@pytest.mark.parametrize("loss", [MEAN, NONE, LossOptions(outputs=("lse",))], ids=["mean", "none", "lse"])
def test_create_graph_is_refused(loss: LossOptions) -> None:
    x, weight, _, targets = leaves_of()
    value = total(tiled_linear_cross_entropy(x, weight, targets, loss=loss))
    message = "^tiled_linear_cross_entropy: create_graph must be False in backward, got True. "
    with pytest.raises(UnsupportedError, match=message):
        torch.autograd.grad(value, [x], create_graph=True)


@REDUCED
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(x_dtype: torch.dtype, loss: LossOptions) -> None:
    """As nn.Linear under autocast: bfloat16 products, gradients in the operands' own dtypes; the loss in float32."""
    x, weight, bias, targets = head(64)
    x = x.detach().to(x_dtype).requires_grad_()
    operands = [x, weight, bias]
    wide = [a.detach().double().requires_grad_() for a in operands]
    truth = torch.autograd.grad(plain(wide[0], wide[1], targets, wide[2], loss.reduction).sum(), wide)
    with torch.autocast("cpu", torch.bfloat16):
        value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=4)
        reference = plain(x, weight, targets, bias, loss.reduction)
    assert value.dtype == torch.float32
    # outside autocast: the dtypes recorded in forward count, in a second backward too
    first = torch.autograd.grad(value.sum(), operands, retain_graph=True)
    theirs = torch.autograd.grad(reference.sum(), operands)
    for grads in (first, torch.autograd.grad(value.sum(), operands)):
        for ours, plain_grad, exact, leaf in zip(grads, theirs, truth, operands, strict=True):
            assert ours.dtype == leaf.dtype
            assert error(ours, exact) <= limit(error(plain_grad, exact), "bfloat16")


def test_autocast_leaves_float64_alone() -> None:
    x, weight, _, targets = leaves_of()
    with torch.autocast("cpu", torch.bfloat16):
        value = tiled_linear_cross_entropy(x, weight, targets, num_shards=4)
    assert value.dtype == torch.float64
    assert error(value, plain(x, weight, targets)) <= DISTRIBUTED_FLOAT64


def test_autocast_leaves_no_cast_behind() -> None:
    """A loss without gradients must not cut the graph of a later use of the same weight under the same autocast."""
    x, weight, _, targets = head(16)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            tiled_linear_cross_entropy(x, weight, targets)
        assert torch.autograd.grad(F.linear(x, weight).sum(), [weight])[0].abs().sum() > 0


@REDUCED
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant: bool, loss: LossOptions) -> None:
    x, weight, bias, targets = leaves_of()

    def block(x: Tensor, call: Any) -> Tensor:
        return 2 * call(F.layer_norm(x, (x.shape[-1],))).sum()

    def tiled(h: Tensor) -> Any:
        return tiled_linear_cross_entropy(h, weight, targets, bias=bias, loss=loss, num_shards=4)

    def untiled(h: Tensor) -> Tensor:
        return plain(h, weight, targets, bias, loss.reduction)

    expected = torch.autograd.grad(block(x, untiled), [x, weight, bias])
    checkpoint(block, x, tiled, use_reentrant=reentrant).backward()
    assert_same([x.grad, weight.grad, bias.grad], expected)


@REDUCED
def test_saved_tensors_may_live_elsewhere(loss: LossOptions) -> None:
    """Offloading hooks, which give back other tensors than they were given: in both backwards of one graph."""
    x, weight, bias, targets = leaves_of()
    expected = torch.autograd.grad(plain(x, weight, targets, bias, loss.reduction).sum(), [x, weight, bias])
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor.detach().numpy().copy())
        return packed[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()
    assert packed
    for retain in (True, False):
        assert_same(torch.autograd.grad(value, [x, weight, bias], retain_graph=retain), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss", [MEAN, LossOptions(outputs=OUTPUTS)], ids=["mean", "outputs"])
def test_without_gradients(mode: Any, loss: LossOptions) -> None:
    x, weight, bias, targets = leaves_of()
    expected: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5)
    assert total(expected).requires_grad
    with mode():
        found: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5)
    parts = (
        [(a, b) for a, b in zip(found, expected, strict=True) if a is not None] if loss.outputs else [(found, expected)]
    )
    assert len(parts) == 1 + len(loss.outputs)
    for ours, theirs in parts:
        assert not ours.requires_grad
        assert torch.equal(ours, theirs.detach())


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "sliced": ((4, 7, 20), lambda leaf: leaf[:, 1:, 2:-2]),
    "strided": ((4, 12, 16), lambda leaf: leaf[:, ::2]),
    "transposed": ((16, 6, 4), lambda leaf: leaf.permute(2, 1, 0)),
    "expanded": ((4, 1, 16), lambda leaf: leaf.expand(4, 6, 16)),
}


@REDUCED
@pytest.mark.parametrize("view", VIEWS)
def test_layouts(view: str, loss: LossOptions) -> None:
    """x, the weight, the targets and the upstream gradient in any layout; int32 targets."""
    shape, see = VIEWS[view]
    torch.manual_seed(0)
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[3], [-100], [8], [0]], dtype=torch.int32).expand(4, 6)
    ours = tiled_linear_cross_entropy(see(leaf), weight.T, targets, loss=loss, num_shards=5)
    theirs = plain(see(leaf), weight.T, targets, None, loss.reduction)
    upstream = torch.tensor(1.5, dtype=torch.float64).expand(ours.shape)
    assert error(ours, theirs) <= DISTRIBUTED_FLOAT64
    found = torch.autograd.grad(ours, [leaf, weight], upstream)
    assert_same(found, torch.autograd.grad(theirs, [leaf, weight], upstream))


@REDUCED
def test_x_changed_in_place_afterwards(loss: LossOptions) -> None:
    """The gradients were computed from the old values, or the change is noticed; a second backward notices it."""
    leaf, weight, bias, targets = leaves_of()
    expected = torch.autograd.grad(plain(2 * leaf, weight, targets, bias, loss.reduction).sum(), [leaf, weight, bias])
    x = 2 * leaf
    value = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5).sum()
    x.mul_(0)
    if loss.gradients_in_forward:
        assert_same(torch.autograd.grad(value, [leaf, weight, bias], retain_graph=True), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, [leaf, weight, bias])


def test_results_may_be_written_to() -> None:
    """No result is a view: a mask in place is seen by autograd, and FSDP2 keeps its hooks."""
    x, weight, bias, targets = leaves_of()
    mask = torch.arange(24, dtype=torch.float64).view(2, 3, 4)
    x_view, targets = x.view(2, 3, 4, 16), targets.view(2, 3, 4)
    result: Any = tiled_linear_cross_entropy(
        x_view, weight, targets, bias=bias, loss=LossOptions(outputs=OUTPUTS, reduction="none"), num_shards=5
    )
    assert not any(part._is_view() for part in result if part is not None)
    result.loss.mul_(mask)
    expected = (plain(x_view, weight, targets, bias, "none") * mask).sum()
    assert_same(
        torch.autograd.grad(result.loss.sum(), [x, weight, bias]), torch.autograd.grad(expected, [x, weight, bias])
    )


def test_an_infinite_upstream_gradient_stays_with_its_token() -> None:
    x, weight, _, targets = leaves_of()
    upstream = torch.ones(24, dtype=torch.float64)
    upstream[5] = torch.inf
    value = tiled_linear_cross_entropy(x, weight, targets, loss=NONE, num_shards=5)
    (found,) = torch.autograd.grad(value, [x], upstream)
    (expected,) = torch.autograd.grad(plain(x, weight, targets, reduction="none"), [x], torch.ones_like(upstream))
    others = torch.arange(24) != 5
    assert error(found[others], expected[others]) <= DISTRIBUTED_FLOAT64
    assert not found[5].isfinite().any()

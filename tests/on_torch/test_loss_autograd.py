"""The autograd contract of the PyTorch loss: gradcheck, upstream gradients, graphs, autocast, checkpointing, misuse."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_specs import LossOptions, LossResult, SpecError, Tiling, UnsupportedError
from shared_specs.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.on_torch.counting import GemmFlop
from tests.on_torch.test_loss_exact import head, total
from tiled_torch import TiledLinearCrossEntropy, tiled_linear_cross_entropy
from tiled_torch.functional import loss_math

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


@pytest.mark.parametrize("bad", [41, -1, 10**9])
@REDUCED
def test_a_missing_target_is_an_error_before_any_work(loss: LossOptions, bad: int) -> None:
    x, weight, _, targets = head(16)
    weight.grad = torch.ones_like(weight)
    targets[3] = bad
    with (
        GemmFlop() as counter,
        pytest.raises(SpecError, match=f"targets must be in .0, 40. or ignore_index.*got {bad}"),
    ):
        tiled_linear_cross_entropy(x, weight, targets, loss=loss).sum().backward()
    assert counter.flop == 0
    assert x.grad is None
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize(
    "loss", [SUM, NONE, LossOptions(reduction="none", outputs=OUTPUTS)], ids=["sum", "none", "outputs"]
)
@pytest.mark.parametrize("bad", [40, -1, 10**9])
def test_a_missing_target_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, bad: int, loss: LossOptions, vocab_shards: int
) -> None:
    """On a device: NaN in the token's loss and in its row of dx, every other row right, nothing read out of bounds."""
    x, weight, bias, targets = leaves_of()
    loss_of_others = plain(x, weight, targets, bias, "none")
    expected = torch.autograd.grad(loss_of_others.sum(), [x])[0]
    targets[5] = bad
    others = torch.arange(24) != 5
    monkeypatch.setattr(loss_math, "first_missing_target", lambda *_: None)
    tiling = Tiling(num_shards=5, vocab_shards=vocab_shards)
    result: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)
    value = result.loss if loss.outputs else result
    dx, dweight, dbias = torch.autograd.grad(value.sum(), [x, weight, bias])
    if loss.reduction == "none":
        assert value.isnan().tolist() == [token == 5 for token in range(24)]
        assert error(value[others], loss_of_others[others]) <= DISTRIBUTED_FLOAT64
    else:
        assert value.isnan()
    assert dx[5].isnan().all()
    assert error(dx[others], expected[others]) <= DISTRIBUTED_FLOAT64
    assert dweight.isnan().all()
    assert dbias.isnan().all()


def test_labels_of_stays_inside_the_vocabulary() -> None:
    targets = torch.tensor([0, 39, 40, -1, -100, 2**40])
    labels = loss_math.labels_of(targets, 40, torch.full((40,), 2.0), -100, torch.float32)
    assert labels.index.tolist() == [0, 39, 0, 0, 0, 0]
    assert labels.counted.isnan().tolist() == [False, False, True, True, False, True]
    assert labels.counted[[0, 1, 4]].tolist() == [1.0, 1.0, 0.0]
    assert labels.weight[[0, 1, 4]].tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize("num_valid", [None, torch.tensor(0), torch.tensor(0.0)], ids=["counted", "0", "0.0"])
def test_a_mean_of_nothing_is_zero(num_valid: Any) -> None:
    """Also where the count of all ranks came out as zero."""
    x, weight, bias, _ = leaves_of()
    loss = LossOptions(num_valid=num_valid, outputs=("accuracy",))
    targets = torch.full((24,), -100)
    result: Any = tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=5)
    assert (result.loss.item(), result.accuracy.item()) == (0.0, 0.0)
    for grad in torch.autograd.grad(result.loss, [x, weight, bias]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_gradient_accumulation_with_a_global_count() -> None:
    """Micro-batches of different lengths and counts add up to the mean over everything."""
    x, weight, bias, targets = leaves_of(40)
    targets[:9] = -100
    expected = torch.autograd.grad(plain(x, weight, targets, bias), [x, weight, bias])
    valid = (targets != -100).sum()
    head = TiledLinearCrossEntropy.from_weights(weight.detach(), bias=bias.detach(), num_shards=3)
    values = []
    for part in (slice(0, 10), slice(10, 37), slice(37, 40)):
        values.append(head(x[part], targets[part], num_valid=valid))
        values[-1].backward()
    assert error(torch.stack(values).sum(), plain(x, weight, targets, bias)) <= DISTRIBUTED_FLOAT64
    assert_same([x.grad, head.weight.grad, head.bias.grad], expected)


def test_an_argument_that_would_lose_its_gradient_is_refused() -> None:
    x, weight, _, targets = head(8)
    for name, value in (("class_weight", torch.ones(40)), ("num_valid", torch.tensor(8.0))):
        loss = LossOptions(**{name: value.requires_grad_()})
        message = (
            f"^tiled_linear_cross_entropy: loss.{name} must be free of requires_grad, got a tensor that requires grad"
        )
        with pytest.raises(SpecError, match=message):
            tiled_linear_cross_entropy(x, weight, targets, loss=loss)


def test_module_is_a_linear_head() -> None:
    """The same parameters by name, drawn the same way, and the same loss."""
    for bias in (True, False):
        torch.manual_seed(0)
        linear = nn.Linear(16, 40, bias=bias)
        torch.manual_seed(0)
        head = TiledLinearCrossEntropy(16, 40, bias=bias, num_shards=3)
        assert list(head.state_dict()) == list(linear.state_dict())
        for ours, theirs in zip(head.parameters(), linear.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        head.load_state_dict(linear.state_dict())
        x, targets = torch.randn(2, 5, 16), torch.randint(40, (2, 5))
        expected = plain(x, linear.weight, targets, linear.bias)
        torch.testing.assert_close(head(x, targets), expected)


def test_module_adopts_weights() -> None:
    linear, raw = nn.Linear(16, 40), torch.randn(40, 16)
    head = TiledLinearCrossEntropy.from_weights(linear.weight, bias=linear.bias)
    assert (head.weight is linear.weight, head.bias is linear.bias) == (True, True)
    head = TiledLinearCrossEntropy.from_weights(raw)
    assert isinstance(head.weight, nn.Parameter)
    assert (head.weight.data_ptr(), head.bias) == (raw.data_ptr(), None)


def test_module_num_valid_of_a_call_replaces_the_option() -> None:
    head = TiledLinearCrossEntropy(16, 40, loss=LossOptions(num_valid=4), dtype=torch.float64)
    x, targets = torch.randn(6, 16, dtype=torch.float64), torch.randint(40, (6,))
    for given, divisor in ((None, 4), (3, 3), (torch.tensor(12), 12)):
        found = head(x, targets, num_valid=given) * divisor
        assert error(found, plain(x, head.weight, targets, reduction="sum")) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("again", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_module_copies(again: Any) -> None:
    head = TiledLinearCrossEntropy(16, 40, bias=True, loss=LossOptions(z_loss=0.1), num_shards=3)
    twin = again(head)
    x, targets = torch.randn(6, 16), torch.randint(40, (6,))
    assert torch.equal(twin(x, targets), head(x, targets))
    assert twin.weight is not head.weight
    assert repr(twin) == repr(head)


def test_module_says_what_it_is() -> None:
    head = TiledLinearCrossEntropy(16, 40, loss=LossOptions(z_loss=0.25), num_shards=3)
    text = repr(head)
    assert text.startswith("TiledLinearCrossEntropy(hidden_size=16, vocab_size=40, LossOptions(")
    for part in ("z_loss=0.25", "num_shards=3", "backend=auto"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"vocab_size": 0}, "TiledLinearCrossEntropy: vocab_size must be >= 1, got 0."),
        ({"loss": LossOptions(z_loss=-1)}, "TiledLinearCrossEntropy: loss.z_loss must be >= 0, got -1."),
        (
            {"tiling": Tiling(keep=0.5)},
            "TiledLinearCrossEntropy: keep must be left out, got 0.5. This function has no use for it.",
        ),
        (
            {"num_shards": 0},
            "TiledLinearCrossEntropy: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose.",
        ),
    ],
    ids=["size", "loss", "keep", "shards"],
)
def test_module_refuses_bad_options(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        TiledLinearCrossEntropy(**{"hidden_size": 16, "vocab_size": 40, **arguments})
    assert str(caught.value) == text

"""The Triton kernels by themselves, in the interpreter: several blocks, ragged edges, descriptors and pointers.

Outputs start as NaN (conftest), so an element that no block wrote is seen. Errors are relative to float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared_specs.config import LossOptions
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import FLOOR
from tests.asserting import assert_near
from tests.kernels.torch_kernel_inputs import (
    DTYPES,
    NUMPY_WARNINGS,
    assert_close,
    draw,
    empty,
    set_blocks,
    watch_addresses,
)
from tiled_torch.core import launch
from tiled_torch.loss import math as loss_math
from tiled_torch.loss import steps as loss_steps
from tiled_torch.loss.kernels import cross_entropy
from tiled_torch.loss.math import Coefficients, Part, Rules
from tiled_torch.loss.steps_kernels import KernelLossSteps
from tiled_torch.mlp.kernels import dgated, glu_elementwise, glu_up, linear, weight_gradient
from tiled_torch.mlp.math import combine_, combine_backward

pytestmark = NUMPY_WARNINGS

T, H, W = 70, 40, 72  # three, two and three of the blocks below, the last one ragged
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
# Every activation in one dtype, every dtype with one activation.
KINDS = [*((activation, "float32") for activation in ACTIVATIONS), ("silu", "bfloat16"), ("gelu", "float16")]


def alternately(name: str, values: tuple[Any, Any]) -> Any:
    """Every kind with one of two values in turn, float32's silu, the simplest, with both."""
    rows = [(*kind, values[at % 2]) for at, kind in enumerate(KINDS)]
    return pytest.mark.parametrize(("activation", "dtype", name), [(*KINDS[0], values[1]), *rows])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch)
    watch_addresses(monkeypatch)
    assert launch.with_descriptors(torch.ones(T, H), torch.ones(W, H))


def reference(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    return function(*(None if a is None else a.double() for a in tensors))


@alternately("bias", (False, True))
def test_glu_up(dtype, activation, bias):
    x, w_gate, w_up = (
        draw(T, H, dtype=dtype),
        draw(W, H, dtype=dtype, scale=0.2),
        draw(W, H, dtype=dtype, scale=0.2, seed=1),
    )
    b_gate, b_up = (draw(W, dtype=dtype, seed=seed) if bias else None for seed in (2, 3))

    def plain(x, w_gate, w_up, b_gate, b_up):
        gate, up = torch.nn.functional.linear(x, w_gate, b_gate), torch.nn.functional.linear(x, w_up, b_up)
        return gate, up, combine_(activation, gate, up, torch.empty_like(gate))

    args = (x, w_gate, w_up, b_gate, b_up)
    truth, rounded = reference(plain, *args), plain(*args)
    gate, up, h = (empty(T, W, dtype=dtype) for _ in range(3))
    glu_up.glu_up(*args, h, gate, up, activation)
    alone = empty(T, W, dtype=dtype)
    glu_up.glu_up(*args, alone, None, None, activation)
    pre = [empty(T, W, dtype=dtype) for _ in range(2)]
    glu_up.glu_up(*args, None, *pre, activation)
    for found, exact, baseline in zip((gate, up, h), truth, rounded, strict=True):
        assert_close(found, exact, baseline, dtype)
    assert torch.equal(alone, h)
    assert all(torch.equal(a, b) for a, b in zip(pre, (gate, up), strict=True))


@pytest.mark.parametrize(
    ("dtype", "bias", "halves"),
    [("float32", False, 1), ("float32", True, 2), ("bfloat16", True, 1), ("bfloat16", False, 2), ("float16", True, 2)],
)
def test_glu_up_auxiliary(dtype, bias, halves, monkeypatch):
    """Over gate itself."""
    set_blocks(monkeypatch, halves=halves)
    x, w_up, gate = draw(T, H, dtype=dtype), draw(W, H, dtype=dtype, scale=0.2), draw(T, W, dtype=dtype, seed=4)
    b_up = draw(W, dtype=dtype) if bias else None

    def plain(x, w_up, b_up, gate):
        up = torch.nn.functional.linear(x, w_up, b_up)
        return combine_("silu", gate, up, torch.empty_like(up))

    truth, rounded = reference(plain, x, w_up, b_up, gate), plain(x, w_up, b_up, gate)
    h = gate.clone()
    glu_up.glu_up_auxiliary(x, w_up, b_up, h, h, "silu")
    assert_close(h, truth, rounded, dtype)


@alternately("halves", (1, 2))
def test_dgated(dtype, activation, halves, monkeypatch):
    """Over gate and up themselves, and into buffers of their own."""
    set_blocks(monkeypatch, halves=halves)
    dy, w_down = draw(T, H, dtype=dtype), draw(H, W, dtype=dtype, scale=0.2)
    gate, up = draw(T, W, dtype=dtype, seed=1), draw(T, W, dtype=dtype, seed=2)

    def plain(dy, w_down, gate, up):
        dh = dy @ w_down
        outs = [torch.empty_like(dh) for _ in range(3)]
        combine_backward(activation, gate, up, dh, tuple(outs))
        return outs

    args = (dy, w_down, gate, up)
    truth, rounded = reference(plain, *args), plain(*args)
    dgate, dup, h = (empty(T, W, dtype=dtype) for _ in range(3))
    dgated.dgated(*args, dgate, dup, h, activation)
    for found, exact, baseline in zip((dgate, h, dup), truth, rounded, strict=True):
        assert_close(found, exact, baseline, dtype)
    over = gate.clone(), up.clone(), empty(T, W, dtype=dtype)
    dgated.dgated(dy, w_down, over[0], over[1], *over, activation)
    assert all(torch.equal(a, b) for a, b in zip(over, (dgate, dup, h), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_few_programs_make_every_block(dtype, monkeypatch):
    """Two programs for nine blocks, with the epilogue in four pieces: what one program a block makes."""
    dy, w_down = draw(T, H, dtype=dtype), draw(H, W, dtype=dtype, scale=0.2)
    gate, up = draw(T, W, dtype=dtype, seed=1), draw(T, W, dtype=dtype, seed=2)
    expected, found = ([empty(T, W, dtype=dtype) for _ in range(3)] for _ in range(2))
    dgated.dgated(dy, w_down, gate, up, *expected, "silu")
    set_blocks(monkeypatch, halves=4, persistent=True)
    grids, start = [], launch.start
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    monkeypatch.setattr(
        launch, "start", lambda kernel, n, *args, **kw: (grids.append(n), start(kernel, n, *args, **kw))
    )
    dgated.dgated(dy, w_down, gate, up, *found, "silu")
    assert grids == [2]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("activation", "dtype"), KINDS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_glu_elementwise(dtype, activation, gated):
    gate = draw(3, W, dtype=dtype) if gated else None
    up, dh = draw(3, W, dtype=dtype, seed=1), draw(3, W, dtype=dtype, seed=2)

    def forward(gate, up):
        return combine_(activation, gate, up, torch.empty_like(up))

    def backward(gate, up, dh):
        outs = [torch.empty_like(up) for _ in range(3 if gated else 2)]
        combine_backward(activation, gate, up, dh, tuple(outs))
        return outs

    h = up.clone() if gate is None else gate.clone()
    glu_elementwise.glu_forward(None if gate is None else h, h if gate is None else up, h, activation)
    assert_close(h, reference(forward, gate, up), forward(gate, up), dtype)
    truth, rounded = reference(backward, gate, up, dh), backward(gate, up, dh)
    dgate, over_up, over_dh = (None if gate is None else gate.clone()), up.clone(), dh.clone()
    glu_elementwise.glu_backward(dgate, over_up, over_dh, dgate, over_dh, over_up, activation)
    found = (over_up, over_dh) if dgate is None else (dgate, over_up, over_dh)
    for ours, exact, baseline in zip(found, truth, rounded, strict=True):
        assert_close(ours, exact, baseline, dtype)


PLAIN = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": lambda a: torch.relu(a).square(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_nan_and_infinity_pass_through(activation, gated):
    """Where the plain MLP has NaN or an infinity and nowhere else; float64, whose gelu of infinity is right on CPUs."""
    special = (torch.nan, torch.inf, -torch.inf, 0.0, 2.0, -2.0)
    gate, up, dh = (column[None].contiguous() for column in torch.cartesian_prod(*[torch.tensor(special)] * 3).T)
    first, second = gate.double().requires_grad_(), up.double().requires_grad_()
    act = PLAIN[activation](first)
    truth = act * second if gated else act
    gradients = torch.autograd.grad(truth, (first, second) if gated else (first,), dh.double())
    h, again, dgate, dup = (torch.full_like(up, 7.0) for _ in range(4))
    glu_elementwise.glu_forward(gate if gated else None, up if gated else gate, h, activation)
    glu_elementwise.glu_backward(
        gate if gated else None, up if gated else gate, dh, dgate if gated else None, dup, again, activation
    )
    found = {
        "h": (h, truth),
        "h of backward": (again, truth),
        "first gradient": (dgate if gated else dup, gradients[0]),
    }
    if gated:
        found["dup"] = (dup, gradients[1])
    exact = {"rtol": FLOOR["float32"], "atol": FLOOR["float32"], "equal_nan": True}
    for name, (ours, plain) in found.items():
        plain = plain.detach().float()
        torch.testing.assert_close(ours, plain, **exact, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_products(dtype):
    x, w, bias = draw(T, H, dtype=dtype), draw(W, H, dtype=dtype), draw(W, dtype=dtype)
    y = empty(T, W, dtype=dtype)
    linear.linear(x, w, bias, y)
    assert_close(y, reference(torch.nn.functional.linear, x, w, bias), torch.nn.functional.linear(x, w, bias), dtype)
    dgate, dup, w_gate = draw(T, W, dtype=dtype), draw(T, W, dtype=dtype, seed=1), draw(W, H, dtype=dtype, seed=2)
    dx = empty(T, H, dtype=dtype)
    linear.dx(dgate, dup, w_gate, w, dx)
    both = lambda dgate, dup, w_gate, w: dup @ w + dgate @ w_gate  # noqa: E731
    assert_close(dx, reference(both, dgate, dup, w_gate, w), both(dgate, dup, w_gate, w), dtype)
    linear.dx(None, dup, None, w, dx)
    assert_close(dx, dup.double() @ w.double(), dup @ w, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient(dtype):
    """The sum over two shards, from what the accumulator holds."""
    a, b = draw(T, H, dtype=dtype), draw(T, W, dtype=dtype)
    acc = empty(H, W, dtype="float32")
    weight_gradient.weight_gradient(acc, a[:32], b[:32], False)
    weight_gradient.weight_gradient(acc, a[32:], b[32:], True)
    assert_close(acc, a.double().T @ b.double(), a.float().T @ b.float(), "float32")
    whole = empty(H, W, dtype="float32")
    weight_gradient.weight_gradient(whole, a, b, False)
    assert torch.equal(whole, acc)  # a multiple of the block's depth: the same additions in the same order


def every_product(dtype: str) -> list[Tensor]:
    """What each kernel that makes products returns for the same operands."""
    x, w_gate, w_up = draw(T, H, dtype=dtype), draw(W, H, dtype=dtype), draw(W, H, dtype=dtype, seed=1)
    gate, up, h, dgate, dup, again = (empty(T, W, dtype=dtype) for _ in range(6))
    glu_up.glu_up(x, w_gate, w_up, w_gate[:, 0].contiguous(), None, h, gate, up, "silu")
    glu_up.glu_up_auxiliary(x, w_up, None, gate, again, "silu")
    w_down, aux = draw(H, W, dtype=dtype), again.clone()
    dgated.dgated(x, w_down, gate, up, dgate, dup, again, "silu")
    y, dx, acc = empty(T, H, dtype=dtype), empty(T, H, dtype=dtype), empty(W, H, dtype="float32")
    linear.linear(h, w_down, None, y)
    linear.dx(dgate, dup, w_gate, w_up, dx)
    weight_gradient.weight_gradient(acc, dgate, x, False)
    weight_gradient.weight_gradient(acc, dup, x, True)
    return [gate, up, h, aux, dgate, dup, again, y, dx, acc]


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pointers_give_what_descriptors_give(dtype, monkeypatch):
    """Older GPUs and rows that are not a multiple of 16 bytes; the same additions in the same order."""
    expected = every_product(dtype)
    monkeypatch.setattr(launch, "with_descriptors", lambda *matrices: False)
    assert all(torch.equal(a, b) for a, b in zip(every_product(dtype), expected, strict=True))


def test_odd_sizes_take_pointers():
    x, w = torch.randn(5, 7), torch.randn(9, 7)
    assert not launch.with_descriptors(x, w)
    y = empty(5, 9, dtype="float32")
    linear.linear(x, w, None, y)
    assert_near(y, x @ w.T)


R, V = 6, 75  # rows and columns of the logits
LOSS_OPTIONS = {
    "plain": LossOptions(),
    "smoothing": LossOptions(label_smoothing=0.2, z_loss=0.01),
    "softcap": LossOptions(logit_softcap=3.0, logit_scale=0.7),
    "everything": LossOptions(label_smoothing=0.2, z_loss=0.01, logit_softcap=3.0, logit_scale=0.7),
}


def labels_and_logits(dtype: str, classes: bool) -> tuple[Any, Tensor]:
    targets = torch.arange(R) * 7 % V
    targets[::5] = -100
    class_weight = torch.linspace(0.5, 2, V) if classes else None
    labels = loss_math.make_labels(Rules(LossOptions(), V), targets, class_weight, torch.float32)
    logits = draw(R, V, dtype=dtype, scale=3.0)
    logits[3, 40:] = -torch.inf  # as a mask of forbidden entries does
    logits[4, :25] = -torch.inf
    return labels, logits


def wide_labels(labels: Any) -> Any:
    parts = (labels.target, labels.counted.double(), labels.weight.double())
    weight = None if labels.class_weight is None else labels.class_weight.double()
    return loss_math.Labels(*parts, weight, labels.total_weight if weight is None else weight.sum())


def present(found: Any) -> list[Tensor]:
    return [a for a in found if a is not None]


def loss_kinds(name: str, values: tuple[Any, Any]) -> Any:
    """All options in every dtype with one of two values in turn, in float32 with both."""
    every = [(option, dtype) for option in LOSS_OPTIONS for dtype in DTYPES]
    rows = [(*kind, values[at % 2]) for at, kind in enumerate(every)]
    more = [(*kind, values[1 - at % 2]) for at, kind in enumerate(every) if kind[1] == "float32"]
    return pytest.mark.parametrize(("name", "dtype", name), [*rows, *more])


@loss_kinds("classes", (False, True))
def test_loss_and_gradient_in_one_pass(name, classes, dtype):
    rules, part = Rules(LOSS_OPTIONS[name], V), Part(0, V)
    labels, logits = labels_and_logits(dtype, classes)
    if rules.smooth:  # its loss of an impossible entry is infinite
        logits = logits.nan_to_num(neginf=-20.0)
    exact, rounded, ours = logits.double(), logits.clone(), logits.clone()
    truth = loss_steps.EAGER.statistics_and_gradient_(rules, exact, part, wide_labels(labels))
    baseline = loss_steps.EAGER.statistics_and_gradient_(rules, rounded, part, labels)
    found = KernelLossSteps().statistics_and_gradient_(rules, ours, part, labels)
    assert_close(ours, exact, rounded, dtype)
    for a, b, c in zip(present(found), present(truth), present(baseline), strict=True):
        assert_close(a, b, c, "float32")


@loss_kinds("start", (0, 30))
def test_two_passes_over_a_part_of_the_vocabulary(name, start, dtype):
    """Statistics with an entropy's moment, then gradients of given coefficients; the logits stay as they are at first."""
    rules, part = Rules(replace(LOSS_OPTIONS[name], outputs=("entropy",)), V), Part(start, V)
    labels, logits = labels_and_logits(dtype, True)
    logits = logits.nan_to_num(neginf=-20.0)[:, start:].contiguous()
    steps, before = KernelLossSteps(), logits.clone()
    truth = loss_steps.EAGER.statistics(rules, logits.double(), part, wide_labels(labels), keep=False)
    baseline = loss_steps.EAGER.statistics(rules, logits.clone(), part, labels, keep=False)
    found = steps.statistics(rules, logits, part, labels, keep=True)
    assert torch.equal(logits, before)
    for a, b, c in zip(present(found), present(truth), present(baseline), strict=True):
        assert_close(a, b, c, "float32")
    k = Coefficients(*(draw(R, dtype="float32", seed=seed) for seed in range(4)))
    lse, entropy = truth.lse.float(), truth.entropy.float()
    exact, rounded = logits.double(), logits.clone()
    wide = Coefficients(*(part.double() for part in k))
    loss_steps.EAGER.gradient_(rules, exact, part, wide_labels(labels), lse.double(), wide, entropy.double())
    loss_steps.EAGER.gradient_(rules, rounded, part, labels, lse, k, entropy)
    steps.gradient_(rules, logits, part, labels, lse, k, entropy)
    assert_close(logits, exact, rounded, dtype)


@pytest.mark.parametrize("width", [16, 31, 32, 48, 80])
def test_rows_of_any_width(width):
    """Widths of 16 are masked as a whole, others at their ends alone: one block, two, and several with a body between."""
    logits, rules = draw(4, width, dtype="float32", scale=3.0), Rules(LOSS_OPTIONS["everything"], width)
    class_weight = torch.linspace(0.5, 2, width)
    labels = loss_math.make_labels(rules, torch.tensor([0, width - 1, -100, 7]), class_weight, torch.float32)
    part, exact, rounded, ours = Part(0, width), logits.double(), logits.clone(), logits.clone()
    truth = loss_steps.EAGER.statistics_and_gradient_(rules, exact, part, wide_labels(labels))
    baseline = loss_steps.EAGER.statistics_and_gradient_(rules, rounded, part, labels)
    found = KernelLossSteps().statistics_and_gradient_(rules, ours, part, labels)
    assert_close(ours, exact, rounded, "float32")
    for a, b, c in zip(present(found), present(truth), present(baseline), strict=True):
        assert_close(a, b, c, "float32")


def test_a_target_that_does_not_exist_is_nan_and_reads_nothing_else():
    """On a GPU nothing is raised: the token's loss and gradient are NaN, every other row is as it was."""
    rules = Rules(LossOptions(), V)
    labels = loss_math.make_labels(rules, torch.tensor([3, V + 5, -7]), None, torch.float32)
    logits = draw(3, V, dtype="float32")
    found = KernelLossSteps().statistics_and_gradient_(rules, logits, Part(0, V), labels)
    losses = loss_math.token_losses(rules, labels, found)
    assert losses.isnan().tolist() == [False, True, True]
    assert logits.isnan().all(1).tolist() == [False, True, True]


OPCHECKS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "glu_up": lambda: (
        glu_up.glu_up, *(torch.ones(shape) for shape in ((4, 8), (16, 8), (16, 8))), None, None, torch.ones(4, 16), None,
        None, "silu",
    ),
    "glu_up_auxiliary": lambda: (
        glu_up.glu_up_auxiliary, torch.ones(4, 8), torch.ones(16, 8), None, torch.ones(4, 16), torch.ones(4, 16), "silu",
    ),
    "dgated": lambda: (
        dgated.dgated, torch.ones(4, 8), torch.ones(8, 16), *(torch.ones(4, 16) for _ in range(5)), "silu",
    ),
    "glu_forward": lambda: (glu_elementwise.glu_forward, *(torch.ones(4, 16) for _ in range(3)), "silu"),
    "glu_backward": lambda: (glu_elementwise.glu_backward, *(torch.ones(4, 16) for _ in range(6)), "silu"),
    "linear": lambda: (linear.linear, torch.ones(4, 8), torch.ones(16, 8), None, torch.ones(4, 16)),
    "dx": lambda: (linear.dx, None, torch.ones(4, 16), None, torch.ones(16, 8), torch.ones(4, 8)),
    "weight_gradient": lambda: (weight_gradient.weight_gradient, torch.ones(8, 16), torch.ones(4, 8), torch.ones(4, 16), True),
    "cross_entropy": lambda: (
        cross_entropy.cross_entropy, torch.ones(4, 9), torch.zeros(4, dtype=torch.long), torch.ones(4), torch.ones(4),
        None, torch.tensor(9.0), None, None, None, torch.ones(5, 4), 9, 0, 1.0, None, 0.0, 0.0, False, True, False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    op, *args = OPCHECKS[name]()
    torch.library.opcheck(op, tuple(args))


def test_bfloat16_is_refused_in_an_interpreter_that_nobody_mended(monkeypatch):
    monkeypatch.setattr(launch, "bfloat16_in_interpreter", False)
    a = torch.ones(4, 8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"^triton: operands must be float32 or float16 in Triton's interpreter"):
        linear.linear(a, a, None, torch.ones(4, 4, dtype=torch.bfloat16))


def test_expanded_gradients_are_copied_and_empty_shards_start_nothing():
    """The gradient of a sum has no strides of its own."""
    dy, w = torch.ones(1, 1).expand(T, H), draw(W, H, dtype="float32")
    y = empty(T, W, dtype="float32")
    linear.linear(dy, w, None, y)
    assert_near(y, dy @ w.T)
    linear.linear(dy[:0], w, None, y[:0])

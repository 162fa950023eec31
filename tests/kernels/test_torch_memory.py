"""Where the Triton kernels read and write: inside what they are given, at addresses of 64 bits, aligned or not.

In the interpreter. What surrounds an operand is NaN and what surrounds a result is a number of its own, so that a read or
a write past the end of a shard is seen, even one that a GPU would get away with.
"""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from shared_specs.config import LossOptions
from tests.kernels.torch_kernel_inputs import (
    NUMPY_WARNINGS,
    assert_same_specials,
    draw,
    empty,
    set_blocks,
    watch_addresses,
)
from tiled_torch.core import launch
from tiled_torch.loss import math as loss_math
from tiled_torch.loss import steps as loss_steps
from tiled_torch.loss.kernels import cross_entropy
from tiled_torch.loss.steps_kernels import KernelLossSteps
from tiled_torch.mlp.kernels import dgated, glu_elementwise, glu_up, linear, weight_gradient
from tiled_torch.mlp.math import combine_, combine_backward

pytestmark = NUMPY_WARNINGS

UNTOUCHED = 7.0
Make = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch)
    watch_addresses(monkeypatch)


class Surrounded:
    """Tensors in the middle of larger ones; `margin` columns on either side, as many rows as a block has and more."""

    def __init__(self, margin: int) -> None:
        self.margin = margin
        self.results: list[tuple[Tensor, Tensor]] = []

    def place(self, a: Tensor, around: float, *, contiguous: bool) -> tuple[Tensor, Tensor]:
        columns = 0 if contiguous else self.margin
        rows = 40 if a.ndim == 2 else 0
        sizes = [a.shape[-1] + 2 * (columns if a.ndim == 2 else 40)]
        sizes = [a.shape[0] + 2 * rows, *sizes] if a.ndim == 2 else sizes
        buffer = torch.full(sizes, around, dtype=a.dtype)
        start = [rows, columns] if a.ndim == 2 else [40]
        view = buffer[tuple(slice(s, s + n) for s, n in zip(start, a.shape, strict=True))]
        view.copy_(a)
        return buffer, view

    def operand(self, *shape: int, seed: int = 0, contiguous: bool = False) -> Tensor:
        return self.place(draw(*shape, dtype="float32", seed=seed), torch.nan, contiguous=contiguous)[1]

    def result(self, *shape: int, like: Tensor | None = None, contiguous: bool = False) -> Tensor:
        a = empty(*shape, dtype="float32") if like is None else like
        self.results.append(self.place(a, UNTOUCHED, contiguous=contiguous))
        return self.results[-1][1]

    def written_outside(self) -> bool:
        for _, view in self.results:
            view.fill_(UNTOUCHED)
        return any(not torch.all(buffer == UNTOUCHED) for buffer, _ in self.results)


class Zeros(Surrounded):
    """The same tensors at addresses as odd, in the middle of zeros: cross_entropy adds up in an order that depends on them."""

    def place(self, a: Tensor, around: float, *, contiguous: bool) -> tuple[Tensor, Tensor]:
        return super().place(a, 0.0, contiguous=contiguous)


def run_glu_up(s: Surrounded, t: int, h: int, w: int) -> None:
    weights = s.operand(w, h, seed=1), s.operand(w, h, seed=2)
    results = (s.result(t, w, like=None) for _ in range(3))
    glu_up.glu_up(s.operand(t, h), *weights, s.operand(w), s.operand(w, seed=1), *results, "silu")


def run_glu_up_auxiliary(s: Surrounded, t: int, h: int, w: int) -> None:
    gate = s.operand(t, w, seed=3)
    glu_up.glu_up_auxiliary(s.operand(t, h), s.operand(w, h, seed=1), s.operand(w), gate, s.result(t, w), "silu")


def run_dgated(s: Surrounded, t: int, h: int, w: int) -> None:
    given = s.operand(t, h), s.operand(h, w, seed=1), s.operand(t, w, seed=2), s.operand(t, w, seed=3)
    dgated.dgated(*given, *(s.result(t, w) for _ in range(3)), "silu")


def run_linear(s: Surrounded, t: int, h: int, w: int) -> None:
    linear.linear(s.operand(t, h), s.operand(w, h, seed=1), s.operand(w), s.result(t, w))


def run_dx(s: Surrounded, t: int, h: int, w: int) -> None:
    given = s.operand(t, w), s.operand(t, w, seed=1), s.operand(w, h, seed=2), s.operand(w, h, seed=3)
    linear.dx(*given, s.result(t, h))


def run_weight_gradient(s: Surrounded, t: int, h: int, w: int) -> None:
    a, b = s.operand(t, w), s.operand(t, h, seed=1)
    acc = s.result(w, h)
    weight_gradient.weight_gradient(acc, a, b, False)
    weight_gradient.weight_gradient(acc, a, b, True)


def run_glu_forward(s: Surrounded, t: int, h: int, w: int) -> None:
    given = (s.operand(t, w, seed=seed, contiguous=True) for seed in range(2))
    glu_elementwise.glu_forward(*given, s.result(t, w, contiguous=True), "silu")


def run_glu_backward(s: Surrounded, t: int, h: int, w: int) -> None:
    given = (s.operand(t, w, seed=seed, contiguous=True) for seed in range(3))
    results = (s.result(t, w, contiguous=True) for _ in range(3))
    glu_elementwise.glu_backward(*given, *results, "silu")


def run_cross_entropy(s: Surrounded, t: int, h: int, w: int) -> None:
    """Both sweeps, with everything that is read beside the logits."""
    t //= 8
    logits = s.result(t, w, like=draw(t, w, dtype="float32"))
    index = torch.full((t + 80,), -(10**9))
    index[40 : 40 + t] = torch.arange(t) % w
    numbers = (s.operand(t, seed=1), s.operand(t, seed=2), s.operand(w, seed=3), torch.tensor(3.0))
    found = s.result(5, t, contiguous=True)
    cross_entropy.cross_entropy(
        logits, index[40 : 40 + t], *numbers, None, None, None, found, w, 0, 1.0, 5.0, 0.1, 0.01, True, True, False, False
    )  # fmt: skip


KERNELS = {name.removeprefix("run_"): function for name, function in list(globals().items()) if name.startswith("run_")}
# Tokens and widths none of which is a multiple of a block; rows of 16 bytes for descriptors, odd ones for pointers.
SIZES = {"descriptors": (8, (40, 24, 40)), "pointers": (3, (39, 23, 41))}


def results(kernel: str, s: Surrounded, sizes: tuple[int, int, int]) -> list[Tensor]:
    KERNELS[kernel](s, *sizes)
    return [view.clone() for _, view in s.results]


@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_past_the_end_of_a_shard_is_read_or_written(kernel: str, way: str) -> None:
    margin, sizes = SIZES[way]
    around, alone = Surrounded(margin), Zeros(margin)
    found, expected = results(kernel, around, sizes), results(kernel, alone, sizes)
    assert found
    assert not any(a.isnan().any() for a in expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not around.written_outside()


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("kernel", ["weight_gradient", "dgated", "linear", "dx"])
@pytest.mark.parametrize("access", ["load", "store"])
def test_a_block_that_is_one_row_or_column_too_long_is_seen(
    access: str, kernel: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that this file is for, a load past the end of the shard whose value reaches no result, and its kin."""
    name = f"create_masked_{access}"
    careful = getattr(interpreter.InterpreterBuilder, name)

    def careless(self: Any, pointers: Any, *rest: Any) -> Any:
        number = 0 if access == "load" else 1
        mask, *rest = (*rest[number:], *rest[:number])
        wide = mask.data | np.roll(mask.data, 1, axis=axis) if mask.data.ndim == 2 else mask.data
        mask = interpreter.TensorHandle(wide, mask.dtype)
        return careful(self, pointers, *((mask, *rest) if access == "load" else (rest[-1], mask, *rest[:-1])))

    monkeypatch.setattr(interpreter.InterpreterBuilder, name, careless)
    verb = {"load": "reads", "store": "writes"}[access]
    margin, sizes = SIZES["pointers"]
    with pytest.raises(interpreter.InterpreterError, match=f"a kernel {verb} outside its tensors"):
        results(kernel, Surrounded(margin), sizes)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_sum_of_nothing_is_zero(bias: bool) -> None:
    """The kernels are compiled for sums of at least one product: no hidden units, no width, no tokens."""
    t, w = 40, 24
    none, b = torch.ones(t, 0), draw(w, dtype="float32") if bias else None
    up = torch.zeros(t, w) + (0.0 if b is None else b)
    gate, pre, h, y = draw(t, w, dtype="float32", seed=1), *(empty(t, w, dtype="float32") for _ in range(3))
    linear.linear(none, torch.ones(w, 0), b, y)
    assert torch.equal(y, up)
    glu_up.glu_up(none, torch.ones(w, 0), torch.ones(w, 0), b, b, h, pre, y, "relu")
    assert torch.equal(pre, up)
    assert torch.equal(y, up)
    assert torch.equal(h, up.relu() * up)
    glu_up.glu_up_auxiliary(none, torch.ones(w, 0), b, gate, h, "relu")
    assert torch.equal(h, gate.relu() * up)
    dgate, dup, h = (empty(t, w, dtype="float32") for _ in range(3))
    dgated.dgated(none, torch.ones(0, w), gate, gate, dgate, dup, h, "relu")
    assert not dgate.any()
    assert not dup.any()
    assert torch.equal(h, gate.relu() * gate)
    linear.dx(none, none, torch.ones(0, w), torch.ones(0, w), y)
    assert not y.any()
    acc = empty(t, w, dtype="float32")
    weight_gradient.weight_gradient(acc, torch.ones(0, t), torch.ones(0, w), False)
    assert not acc.any()
    acc.fill_(2.0)
    weight_gradient.weight_gradient(acc, torch.ones(0, t), torch.ones(0, w), True)
    assert torch.all(acc == 2.0)


def test_a_single_column_has_any_strides() -> None:
    """What PyTorch calls contiguous: the transpose of one row, as a weight for one hidden unit may be."""
    x, w, y = draw(40, 1, dtype="float32"), draw(1, 24, dtype="float32").T, empty(40, 24, dtype="float32")
    assert w.is_contiguous()
    assert w.stride() == (1, 24)
    linear.linear(x, w, None, y)
    assert torch.equal(y, x @ w.T)


def off_by_four_bytes(a: Tensor) -> Tensor:
    """As an array of another library may come: a storage of its own whose address is no multiple of 16."""
    memory = np.empty(a.numel() * 4 + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    found = torch.from_numpy(memory[start : start + a.numel() * 4].view(np.float32)).view(a.shape)
    return found.copy_(a)


def test_an_address_that_is_no_multiple_of_16_takes_pointers() -> None:
    x, w = draw(40, 24, dtype="float32"), draw(40, 24, dtype="float32", seed=1)
    off, y, expected = off_by_four_bytes(x), empty(40, 40, dtype="float32"), empty(40, 40, dtype="float32")
    assert off.storage_offset() == 0
    assert launch.with_descriptors(x, w)
    assert not launch.with_descriptors(off, w)
    linear.linear(off, w, None, y)
    linear.linear(x, w, None, expected)
    assert torch.equal(y, expected)


FAR = 2**31
RESERVE_NOTHING = 0x4000  # MAP_NORESERVE of Linux, which the mmap module does not name


def far_memory() -> Tensor:
    """float16, three times 2^31 elements, all zero, of which only the pages that are used take memory.

    What a test uses begins after the first third: an offset that wrapped round 32 bits ends up there, not in a crash.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | RESERVE_NOTHING
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 6 * FAR, flags=flags), np.float16))


def far_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Its last row begins more than 2^31 elements after its first."""
    stride = -(-FAR // (rows - 1)) + 8
    a = far_memory()[FAR:].as_strided((rows, columns), (stride, 1))
    return a.copy_(draw(rows, columns, dtype="float16", seed=seed))


def test_rows_past_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that takes pointers to rows: the row's offset is a product of 64 bits."""
    monkeypatch.setattr(launch, "with_descriptors", lambda *matrices: False)
    near = [draw(3, 24, dtype="float16", seed=seed) for seed in range(5)]
    far = [far_matrix(3, 24, seed=seed) for seed in range(5)]

    def run(dy: Tensor, gate: Tensor, up: Tensor, w: Tensor, h: Tensor) -> list[Tensor]:
        linear.linear(dy, w, None, h[:, :3])
        glu_up.glu_up(dy, w, w, None, None, gate[:, :3], up[:, :3], h[:, 3:6], "silu")
        glu_up.glu_up_auxiliary(dy, w, None, gate[:, 8:11], h[:, 16:19], "silu")
        linear.dx(gate[:, :3], up[:, :3], w, w, dy)
        weight_gradient.weight_gradient(w, gate[:, :3], dy, True)
        dgated.dgated(up[:, :3], w, gate, dy, gate, dy, h, "silu")
        rules = loss_math.Rules(LossOptions(), 24)
        labels = loss_math.make_labels(rules, torch.arange(3), None, torch.float32)
        KernelLossSteps().statistics_and_gradient_(rules, up, loss_math.Part(0, 24), labels)
        return [dy, gate, up, w, h]

    assert all(torch.equal(a, b) for a, b in zip(run(*far), run(*near), strict=True))


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_elementwise_work_past_two_to_the_31_elements(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of 131072 tokens and 28672 hidden units has 3.8e9. The last two programs are run, the others left out."""
    set_program = interpreter.InterpreterBuilder.create_get_program_id
    columns, tail = 32, 40
    elements = FAR + tail
    skipped = -(-elements // columns) - 2

    def late(self: Any, axis: int) -> Any:
        found = set_program(self, axis)
        return interpreter.TensorHandle(found.data + np.int32(skipped), found.dtype)

    class Launched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            assert grid == (skipped + 2,)
            return self.kernel[(2,)]

    buffers = [far_memory()[FAR : FAR + elements].view(1, elements) for _ in range(3)]
    last = [draw(1, tail, dtype="float16", seed=seed) for seed in range(3)]
    for buffer, values in zip(buffers, last, strict=True):
        buffer[:, -tail:] = values
    gate, up, dh = buffers
    if forward:
        glu_elementwise.glu_forward(last[0], last[1], last[0], "silu")
    else:
        glu_elementwise.glu_backward(last[0], last[1], last[2], last[0], last[2], last[1], "silu")
    start = launch.start
    monkeypatch.setattr(launch, "start", lambda kernel, *args, **kw: start(Launched(kernel), *args, **kw))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", late)
    if forward:
        glu_elementwise.glu_forward.wrapper(gate, up, gate, "silu")
    else:
        glu_elementwise.glu_backward.wrapper(gate, up, dh, gate, dh, up, "silu")
    for buffer, values in zip(buffers, last, strict=True):
        assert torch.equal(buffer[:, -tail:], values)


SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 2.0, -2.0])
ACTIVATIONS = (
    "silu",
    "gelu_tanh",
    "relu",
    "relu_squared",
)  # exact gelu of an infinity is NaN in some builds of PyTorch


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_products_pass_nan_and_infinity_on_as_eager_steps_do(activation: str) -> None:
    """Products by one, so that the epilogues see every pair of special values."""
    gate, up = (column.reshape(6, 6).contiguous() for column in torch.cartesian_prod(SPECIAL, SPECIAL).T)
    one = torch.ones(1, 6)

    def backward(dh: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
        dgate, h, dup = (torch.empty_like(dh) for _ in range(3))
        combine_backward(activation, gate, up, dh, (dgate, h, dup))
        return [dgate, dup, h]

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return combine_(activation, gate, up, torch.empty_like(up))

    for special in SPECIAL:
        dy, found = torch.full((6, 1), special.item()), [torch.empty(6, 6) for _ in range(3)]
        dgated.dgated(dy, one, gate, up, *found, activation)
        truth, plain = backward((dy @ one).double(), gate.double(), up.double()), backward(dy @ one, gate, up)
        for results in zip(found, truth, plain, strict=True):
            assert_same_specials(*results)
    x, h = SPECIAL[:, None].contiguous(), torch.empty(6, 6)
    up = x @ one
    glu_up.glu_up_auxiliary(x, one.T, None, gate, h, activation)
    assert_same_specials(h, forward(gate.double(), up.double()), forward(gate, up))
    glu_up.glu_up(x, one.T, one.T, None, None, h, None, None, activation)
    assert_same_specials(h, forward(up.double(), up.double()), forward(up, up))


@pytest.mark.parametrize("options", [LossOptions(), LossOptions(logit_softcap=3.0)], ids=["", "softcap"])
def test_logits_that_are_nan_or_infinite_give_what_eager_steps_give(options: LossOptions) -> None:
    logits = draw(6, 75, dtype="float32")
    logits[torch.arange(6), torch.tensor([3, 40, 70, 5, 6, 7])] = SPECIAL
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    rules = loss_math.Rules(options, 75)
    labels = loss_math.make_labels(rules, torch.arange(6) * 13 % 75, None, torch.float32)
    rows = []
    for steps, values in (
        (KernelLossSteps(), logits),
        (loss_steps.EAGER, logits.double()),
        (loss_steps.EAGER, logits.clone()),
    ):
        found = steps.statistics_and_gradient_(rules, values, loss_math.Part(0, 75), labels)
        rows.append((values, loss_math.token_losses(rules, labels, found)))
    for results in zip(*rows, strict=True):
        assert_same_specials(*results)

"""Exact figures of the PyTorch MLP: FLOP, saved bytes, peak bytes, hooks, and which backend ran."""

import itertools
import os
import traceback
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shared_specs import Tiling
from shared_specs.core import budget as budgets
from shared_specs.core.rounding import relative_error
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import plan_tokens
from shared_specs.tolerances import BF16_256_SHARDS, COST_BYTES
from tests.core.torch_counting import GemmFlop, LiveBytes, saved_bytes
from tiled_torch import TiledMLP, backends, tiled_linear_cross_entropy, tiled_mlp

H, I = 32, 96  # noqa: E741
PACKAGE = os.path.dirname(backends.__file__)


def operands(T: int, dtype: torch.dtype = torch.float32, gated: bool = True, hidden: int = H, inter: int = I) -> Any:
    """x and the weights w_gate (None without a gate), w_up, w_down, all leaves."""
    torch.manual_seed(0)
    x = torch.randn(T, hidden, dtype=dtype, requires_grad=True)
    shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
    weights: list[Tensor | None] = [(torch.randn(s) / s[1] ** 0.5).to(dtype).requires_grad_() for s in shapes]
    if not gated:
        weights[0] = None
    return x, weights


def leaves(x: Tensor, weights: list[Tensor | None]) -> list[Tensor]:
    return [x, *(w for w in weights if w is not None)]


def count_flop(call: Any, *args: Any) -> int:
    with GemmFlop() as counter:
        call(*args).sum().backward()
    return counter.flop


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
def test_flop(mode: Any, keep: float, gated: bool) -> None:
    x, weights = operands(128, gated=gated)

    def block(x: Tensor) -> Tensor:  # the residual saves nothing, so the MLP is the last thing saved
        return x + tiled_mlp(x, *weights, num_shards=4, keep=keep)

    def run(x: Tensor) -> Tensor:
        return block(x) if mode == "none" else checkpoint(block, x, use_reentrant=mode == "reentrant")

    shape = mlp_costs.MLPShape(tokens=128, hidden=H, intermediate=I, gated=gated)
    plan = plan_tokens(128, num_shards=4)
    assert count_flop(run, x) == mlp_costs.mlp_flop(shape, plan, keep=keep, checkpointing=mode)


def test_flop_formulas() -> None:
    """22 - 4f, 22 and 28 - 4f THI, by hand."""
    shape = mlp_costs.MLPShape(tokens=128, hidden=H, intermediate=I)
    plan, thi = plan_tokens(128, num_shards=4), 2 * 128 * H * I
    for keep, f in ((0.0, 0), (0.5, 0.5), (1.0, 1)):
        assert mlp_costs.mlp_flop(shape, plan, keep=keep) * 2 == (22 - 4 * f) * thi
        assert mlp_costs.mlp_flop(shape, plan, keep=keep, checkpointing="non-reentrant") * 2 == 22 * thi
        assert mlp_costs.mlp_flop(shape, plan, keep=keep, checkpointing="reentrant") * 2 == (28 - 4 * f) * thi


@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
def test_plain_flop_is_what_the_formula_says(mode: Any) -> None:
    x, weights = operands(128)

    def block(x: Tensor) -> Tensor:
        return x + F.linear(F.silu(F.linear(x, weights[0])) * F.linear(x, weights[1]), weights[2])

    def run(x: Tensor) -> Tensor:
        return block(x) if mode == "none" else checkpoint(block, x, use_reentrant=mode == "reentrant")

    shape = mlp_costs.MLPShape(tokens=128, hidden=H, intermediate=I)
    assert count_flop(run, x) == mlp_costs.plain_flop(shape, checkpointing=mode)


@pytest.mark.parametrize(("keep", "gated"), list(itertools.product([0.0, 0.25, 0.5, 1.0], [True, False])))
def test_saved_bytes(keep: float, gated: bool) -> None:
    x, weights = operands(1000, gated=gated)
    _, found = saved_bytes(lambda: tiled_mlp(x, *weights, num_shards=8, keep=keep), exclude=leaves(x, weights))
    shape = mlp_costs.MLPShape(tokens=1000, hidden=H, intermediate=I, gated=gated)
    assert found == mlp_costs.saved_bytes(shape, plan_tokens(1000, num_shards=8), keep=keep)


def test_plain_saved_bytes() -> None:
    x, weights = operands(64)
    _, found = saved_bytes(
        lambda: F.linear(F.silu(F.linear(x, weights[0])) * F.linear(x, weights[1]), weights[2]),
        exclude=leaves(x, weights),
    )
    assert found == mlp_costs.plain_saved_bytes(mlp_costs.MLPShape(tokens=64, hidden=H, intermediate=I))


PEAKS = [
    (dtype, gated, activation, T, 1024)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for gated in (True, False)
    for activation in ("silu", "relu_squared")
    for T in (4096, 6144)
]
# Shards so short that elementwise temporaries would be as long as they are.
PEAKS += [
    (torch.float32, True, "relu_squared", 4096, 64),
    (torch.bfloat16, True, "silu", 4096, 256),
    (torch.float16, False, "gelu", 4096, 256),
]


@pytest.mark.parametrize(("dtype", "gated", "activation", "T", "t"), PEAKS)
def test_peak_bytes(dtype: torch.dtype, gated: bool, activation: Any, T: int, t: int) -> None:
    """The formula to the byte, the same at every T, and never a [T, I] tensor."""
    hidden, inter = 64, 512
    x, weights = operands(T, dtype, gated, hidden, inter)
    dy = torch.randn(T, hidden).to(dtype)
    shape = mlp_costs.MLPShape(
        tokens=T,
        hidden=hidden,
        intermediate=inter,
        gated=gated,
        activation=activation,
        itemsize=dtype.itemsize,
        weight_itemsize=dtype.itemsize,
    )
    with LiveBytes() as forward:
        y = tiled_mlp(x, *weights, num_shards=T // t, activation=activation)
    with LiveBytes() as backward:
        grads = torch.autograd.grad(y, leaves(x, weights), dy)
    predicted = mlp_costs.peak_bytes(shape, plan_tokens(T, num_shards=T // t))
    assert backward.peak_above(grads) == predicted
    assert forward.peak_above([y]) <= predicted
    assert max(forward.largest, backward.largest) < T * inter * dtype.itemsize
    five = 5 * t * inter * dtype.itemsize + mlp_costs.accumulator_bytes(shape, plan_tokens(T, num_shards=T // t))
    copies = t * (inter + hidden) * 4 if dtype.itemsize < 4 else 0
    assert predicted <= five + copies


def test_peak_bytes_under_autocast() -> None:
    """Weights in float32 are there in bfloat16 as well."""
    x, weights = operands(2048, hidden=128, inter=512)
    shape = mlp_costs.MLPShape(tokens=2048, hidden=128, intermediate=512, itemsize=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled_mlp(x, *weights, num_shards=8)
    dy = torch.ones_like(y)
    with LiveBytes() as backward:
        grads = torch.autograd.grad(y, leaves(x, weights), dy)
    predicted = mlp_costs.peak_bytes(shape, plan_tokens(2048, num_shards=8))
    rows = 2048 // 8 * 128 * 2  # a shard of x in bfloat16
    assert backward.peak - sum(grad.numel() * grad.itemsize for grad in grads) - rows == pytest.approx(
        predicted, rel=COST_BYTES
    )
    assert shape.cast_bytes > COST_BYTES * predicted


def test_what_can_run_here_is_found_out_once_a_call(monkeypatch) -> None:
    """It asks the driver on a machine with a GPU."""
    calls, usable = [], backends.usable_backends
    monkeypatch.setattr(backends, "usable_backends", lambda: (calls.append(1), usable())[1])
    x, weights = operands(8)
    tiled_mlp(x, *weights)
    assert len(calls) == 1
    tiled_linear_cross_entropy(x, weights[0], torch.zeros(8, dtype=torch.long))  # type: ignore[arg-type]
    assert len(calls) == 2


def test_a_forward_casts_each_weight_once() -> None:
    """It was cast a second time for the shards that are kept, and none was."""
    x, weights = operands(64)
    cast: list[int] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                cast.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Casts():
        tiled_mlp(x, *weights, num_shards=4)
    assert [cast.count(w.data_ptr()) for w in weights] == [1, 1, 1]


def test_few_frames_between_the_module_and_its_products(monkeypatch) -> None:
    """A reader who steps from TiledMLP.forward into the first product meets seven functions, in backward at most four."""
    product, stacks = torch.mm, []

    def mm(*args: Any, **options: Any) -> Tensor:
        stacks.append([frame.name for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)])
        return product(*args, **options)

    layer, x = TiledMLP(H, I), torch.randn(8, H)
    monkeypatch.setattr(torch, "mm", mm)
    layer(x).sum().backward()
    assert stacks[0] == ["forward", "tiled_mlp", "run_checked", "forward", "forward", "hidden", "linear"]
    assert max(len(stack) for stack in stacks[3:]) <= 4


def test_memory_budget_is_kept_and_used() -> None:
    x, weights = operands(4096, hidden=64, inter=512)
    shape = mlp_costs.MLPShape(tokens=4096, hidden=64, intermediate=512)
    budget = 3 * 2**20
    y, dy = tiled_mlp(x, *weights, tiling=Tiling(memory_budget=budget)), torch.ones(4096, 64)
    with LiveBytes() as backward:
        grads = torch.autograd.grad(y, leaves(x, weights), dy)
    peak = backward.peak - sum(grad.numel() * grad.itemsize for grad in grads)
    t = budgets.shard_tokens_within("test", budget, 4096, partial(mlp_costs.peak_bytes, shape))
    assert peak <= budget
    assert mlp_costs.peak_bytes(shape, plan_tokens(4096, shard_tokens=t + 1)) > budget


def test_hooks_fire_once_per_parameter() -> None:
    x, weights = operands(64)
    fired = {"post": 0, "grad": 0}

    def post(parameter: Tensor) -> None:
        fired["post"] += 1

    def halve(grad: Tensor) -> Tensor:
        fired["grad"] += 1
        return 0.5 * grad

    for w in weights:
        w.register_post_accumulate_grad_hook(post)
    weights[0].register_hook(halve)
    plain = torch.autograd.grad(tiled_mlp(x, *weights, num_shards=8).sum(), weights[1])
    fired.update(post=0, grad=0)
    tiled_mlp(x, *weights, num_shards=8).sum().backward()
    assert fired == {"post": 3, "grad": 1}
    assert torch.equal(weights[1].grad, plain[0])


def test_autograd_grad_leaves_grad_alone() -> None:
    x, weights = operands(64)
    grads = torch.autograd.grad(tiled_mlp(x, *weights, num_shards=3).sum(), [x, *weights])
    assert all(grad is not None for grad in grads)
    assert all(leaf.grad is None for leaf in (x, *weights))


def test_bfloat16_does_not_drift_at_256_shards() -> None:
    x, weights = operands(4096, torch.bfloat16, hidden=64, inter=128)
    dy = (torch.randn(4096, 64) + 0.25).to(torch.bfloat16)

    def gradients(call: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves), leaves[1:], dy.to(leaves[0].dtype))

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    truth = gradients(plain, [leaf.detach().double().requires_grad_() for leaf in (x, *weights)])
    untiled = gradients(plain, [x, *weights])
    tiled = gradients(lambda *a: tiled_mlp(*a, num_shards=256), [x, *weights])
    for exact, ours, theirs in zip(truth, tiled, untiled, strict=True):
        error, reference = (relative_error(g.double().numpy(), exact.numpy()) for g in (ours, theirs))
        assert error <= BF16_256_SHARDS * reference


def test_backend_that_ran() -> None:
    x, weights = operands(8)
    for backend in ("auto", "eager"):
        backends.record_run("tiled_mlp", "nothing")
        tiled_mlp(x, *weights, backend=backend)
        assert backends.last_run("tiled_mlp") == "eager"

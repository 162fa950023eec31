"""Exact figures of the PyTorch mixture of experts: FLOP, bytes, hooks, precision, and the block of a transformers model."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from shared_specs import Tiling, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.moe import costs as moe_costs
from shared_specs.moe.costs import MoEShape
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import BF16_256_SHARDS, MODEL_FLOAT32
from tests.asserting import assert_near
from tests.core.torch_counting import GemmFlop, LiveBytes, saved_bytes
from tiled_torch import TiledMoE, backends, tiled_moe

H, I, E, K = 32, 48, 8, 2  # noqa: E741


def operands(tokens: int, dtype: torch.dtype = torch.float32, *, hot: bool = False, inter: int = I) -> list[Any]:
    """x and w_router, w_gate, w_up, w_down, all leaves. hot: all tokens choose the first two experts."""
    torch.manual_seed(0)
    x, w_router = torch.randn(tokens, H), torch.randn(E, H) / H**0.5
    x[:, 0] = 1
    if hot:
        w_router[:K, 0] += 9
    experts = [
        torch.randn(E, inter, H) / H**0.5,
        torch.randn(E, inter, H) / H**0.5,
        torch.randn(E, H, inter) / inter**0.5,
    ]
    return [a.to(dtype).requires_grad_() for a in (x, w_router, *experts)]


def shape(tokens: int, dtype: torch.dtype = torch.float32, inter: int = I) -> MoEShape:
    sizes = {"itemsize": dtype.itemsize, "weight_itemsize": dtype.itemsize}
    return MoEShape(tokens=tokens, hidden=H, intermediate=inter, experts=E, top_k=K, **sizes)


def untiled(x: Tensor, w_router: Tensor, *experts: Tensor) -> Tensor:
    """Every expert on every token."""
    weights, index = torch.softmax(F.linear(x, w_router), -1).topk(K, -1)
    share = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weights / weights.sum(-1, keepdim=True))
    parts = [
        F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for gate, up, down in zip(*experts, strict=True)
    ]
    return (torch.stack(parts, 1) * share[..., None]).sum(1)


@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
def test_flop(mode: Any) -> None:
    """11 products of a routed token, as of an MLP, wherever the tokens go; a replay computes the router alone."""
    for hot in (False, True):
        x, *w = operands(50, hot=hot)

        def block(x: Tensor, w: Any = w) -> Tensor:
            return x + tiled_moe(x, *w, top_k=K, num_shards=4)

        with GemmFlop() as counter:
            y = block(x) if mode == "none" else checkpoint(block, x, use_reentrant=mode == "reentrant")
            y.sum().backward()
        assert counter.flop == moe_costs.moe_flop(shape(50), checkpointing=mode)


def test_flop_formula() -> None:
    """By hand."""
    assert moe_costs.moe_flop(shape(50)) == 22 * 50 * K * H * I + 8 * 50 * H * E
    assert moe_costs.moe_flop(shape(50), rows=120) == 22 * 120 * H * I + 8 * 50 * H * E


def test_saved_bytes() -> None:
    operand = operands(100)
    _, found = saved_bytes(lambda: tiled_moe(*operand, top_k=K, num_shards=4), exclude=operand)
    assert found == moe_costs.moe_saved_bytes(shape(100)) == 100 * K * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_peak_bytes(dtype: torch.dtype) -> None:
    """Within the formula, to a sixth of it, and the same however many tokens an expert has."""
    tokens, t, inter = 2048, 128, 256
    peaks = []
    for hot in (False, True):
        operand = operands(tokens, dtype, hot=hot, inter=inter)
        with LiveBytes() as forward:
            y = tiled_moe(*operand, top_k=K, tiling=Tiling(shard_tokens=t))
        dy = torch.ones_like(y)
        with LiveBytes() as backward:
            grads = torch.autograd.grad(y, operand, dy)
        kept = moe_costs.moe_saved_bytes(shape(tokens, dtype))
        predicted = moe_costs.moe_peak_bytes(shape(tokens, dtype, inter), ShardPlan(tokens, t))
        assert 5 / 6 * predicted <= backward.peak_above(grads) <= predicted
        assert forward.peak_above([y]) <= predicted + kept
        assert max(forward.largest, backward.largest) < tokens * K * inter * dtype.itemsize
        peaks.append(backward.peak_above(grads))
    assert peaks[1] <= 1.02 * peaks[0]


def test_peak_bytes_grow_with_tokens_by_numbers_of_pairs_alone() -> None:
    def peak(tokens: int) -> int:
        operand = operands(tokens)
        y = tiled_moe(*operand, top_k=K, tiling=Tiling(shard_tokens=64))
        dy = torch.ones_like(y)
        with LiveBytes() as backward:
            grads = torch.autograd.grad(y, operand, dy)
        return backward.peak_above(grads)

    assert peak(1024) - peak(512) <= 512 * K * 16


def test_a_memory_budget_is_kept_and_used() -> None:
    operand, budget = operands(2048, inter=256), 2**20
    y = tiled_moe(*operand, top_k=K, tiling=Tiling(memory_budget=budget))
    dy = torch.ones_like(y)
    with LiveBytes() as backward:
        grads = torch.autograd.grad(y, operand, dy)
    assert budget / 2 < backward.peak_above(grads) <= budget


def test_bfloat16_does_not_drift_at_256_shards() -> None:
    operand = operands(2048, torch.bfloat16)
    dy = torch.randn(2048, H) + 0.25

    def gradients(call: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves), leaves[1:], dy.to(leaves[0].dtype))

    exact = gradients(untiled, [a.detach().double().requires_grad_() for a in operand])
    whole, tiled = (gradients(lambda *a, n=n: tiled_moe(*a, top_k=K, num_shards=n), operand) for n in (1, 256))
    for truth, ours, one in zip(exact, tiled, whole, strict=True):
        error, reference = (relative_error(g.double().numpy(), truth.numpy()) for g in (ours, one))
        assert error <= BF16_256_SHARDS * reference


def test_under_autocast() -> None:
    """float32 parameters, products in bfloat16, gradients in float32."""
    operand = operands(40)
    with torch.autocast("cpu", torch.bfloat16):
        y, logits = tiled_moe(*operand, top_k=K, num_shards=3, return_router_logits=True)
    cast = [a.detach().bfloat16().requires_grad_() for a in operand]
    expected, their_logits = tiled_moe(*cast, top_k=K, num_shards=3, return_router_logits=True)
    assert torch.equal(y, expected)
    assert torch.equal(logits, their_logits)
    assert logits.dtype == torch.float32
    found = torch.autograd.grad(y.float().sum() + logits.logsumexp(-1).square().mean(), operand)
    assert {d.dtype for d in found} == {torch.float32}


def test_main_grad_and_hooks() -> None:
    """Of a training framework: gradients go to its buffers, and each parameter's hook fires once."""
    x, *w = operands(40, torch.float64)
    expected = torch.autograd.grad(tiled_moe(x, *w, top_k=K, num_shards=4).sum(), w)
    fired: list[int] = []
    for i, parameter in enumerate(w):
        parameter.register_hook(lambda d, i=i: fired.append(i))
    tiled_moe(x, *w, top_k=K, num_shards=4).sum().backward()
    assert sorted(fired) == [0, 1, 2, 3]
    for parameter in w:
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
    for _ in range(2):
        tiled_moe(x, *w, top_k=K, num_shards=4).sum().backward()
    for parameter, gradient in zip(w, expected, strict=True):
        assert parameter.grad is None
        assert_near(parameter.main_grad, 2 * gradient)


def test_a_balancing_loss_alone_reaches_the_router() -> None:
    x, *w = operands(30, torch.float64)
    _, logits = tiled_moe(x, *w, top_k=K, num_shards=4, return_router_logits=True)
    found = torch.autograd.grad(logits.square().mean(), [x, *w], allow_unused=True)
    expected = torch.autograd.grad(F.linear(x, w[0]).square().mean(), [x, w[0]])
    assert found[2:] == (None, None, None)
    for ours, theirs in zip(found, expected, strict=False):
        assert_near(ours, theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_has_no_derivative_is_refused() -> None:
    x, *w = operands(8)
    y = tiled_moe(x, *w, top_k=K)
    with pytest.raises(UnsupportedError, match=r"^tiled_moe: create_graph must be False in backward, got True\."):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"^tiled_moe: this call is inside torch\.func\."):
        torch.func.grad(lambda x: tiled_moe(x, *w, top_k=K).sum())(x)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"^tiled_moe: this call is in forward mode\."):
        tiled_moe(forward_ad.make_dual(x, torch.ones_like(x)), *w, top_k=K)
    assert backends.last_run("tiled_moe") == "eager"


def test_module() -> None:
    moe, x = TiledMoE(H, I, E, K, num_shards=3, dtype=torch.float64), operands(20, torch.float64)[0]
    assert {name: tuple(p.shape) for name, p in moe.named_parameters()} == {
        "w_router": (E, H),
        "w_gate": (E, I, H),
        "w_up": (E, I, H),
        "w_down": (E, H, I),
    }
    assert_near(moe(x), untiled(x, *moe.parameters()))
    other = TiledMoE(H, I, E, K, dtype=torch.float64, return_router_logits=True)
    other.load_state_dict(moe.state_dict())
    y, logits = other(x.view(4, 5, H))
    assert_near(y.view(20, H), moe(x))
    assert_near(logits.view(20, E), F.linear(x, moe.w_router))
    around = TiledMoE.from_weights(*moe.parameters(), top_k=K)
    assert around.w_up is moe.w_up
    for again in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert torch.equal(again(x), moe(x))
    assert "num_experts=8, top_k=2" in repr(moe)


def test_the_block_of_a_transformers_model() -> None:
    """Qwen3-MoE's, with the same weights: y and all gradients. Its softmax is float32 whatever the weights are."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes, norm_topk_prob=True)
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    gate, up = block.experts.gate_up_proj.detach().chunk(2, dim=1)
    moe = TiledMoE.from_weights(
        block.gate.weight, gate.clone(), up.clone(), block.experts.down_proj, top_k=K, num_shards=5
    )
    x = torch.randn(3, 7, H, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    theirs = [block(x), *torch.autograd.grad(block(x), [x, *block.parameters()], dy)]
    y = moe(x)
    dx, d_router, d_gate, d_up, d_down = torch.autograd.grad(y, [x, *moe.parameters()], dy)
    named = dict(zip(("y", "x", *(n for n, _ in block.named_parameters())), theirs, strict=True))
    ours = {"y": y, "x": dx, "gate.weight": d_router, "experts.down_proj": d_down}
    ours["experts.gate_up_proj"] = torch.cat([d_gate, d_up], 1)
    assert ours.keys() == named.keys()
    for name, found in ours.items():
        assert relative_error(found.detach().numpy(), named[name].detach().numpy()) <= MODEL_FLOAT32, name


# What the compiler does with tensors that it takes up after a break in the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.deep
def test_around_a_call_a_model_is_compiled() -> None:
    moe, x = TiledMoE(H, I, E, K, num_shards=3), operands(20)[0]
    expected = torch.autograd.grad(torch.tanh(moe(x)).sum(), [x, *moe.parameters()])
    compiled = torch.compile(lambda x: torch.tanh(moe(x)).sum(), backend="aot_eager")
    for ours, theirs in zip(torch.autograd.grad(compiled(x), [x, *moe.parameters()]), expected, strict=True):
        assert_near(ours, theirs)

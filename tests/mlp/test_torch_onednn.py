"""The MLP by oneDNN's products: its numbers, its exact figures, and where it is chosen."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from shared_specs import Tiling
from shared_specs.config import ACTIVATIONS
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp.cases import MLPCase
from shared_specs.shards import ShardPlan, plan_tokens
from shared_specs.tolerances import COST_BYTES
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.core.torch_counting import GemmFlop, LiveBytes
from tiled_torch import tiled_mlp
from tiled_torch.mlp import steps_onednn
from tiled_torch.mlp.loops import steps_for
from tiled_torch.mlp.steps import EAGER, Steps, Weights

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.backends.mkldnn.is_available(),
    reason="this PyTorch was built without oneDNN",
)

CASE = partial(MLPCase, hidden=24, intermediate=64, num_shards=3)
CASES = [
    *(CASE(dims=(50,), activation=activation, reason="every activation") for activation in ACTIVATIONS),
    *(CASE(dims=(50,), activation=activation, gated=False, reason="without a gate") for activation in ACTIVATIONS),
    CASE(dims=(2, 25), biases=("gate", "up", "down"), reason="every bias"),
    CASE(dims=(50,), biases=("up", "down"), gated=False, keep=0.5, reason="some kept, plain"),
    CASE(dims=(50,), keep=0.5, reason="kept and recomputed shards share buffers"),
    CASE(dims=(50,), keep=1.0, biases=("gate",), reason="nothing is recomputed"),
    CASE(dims=(50,), out=16, reason="another width comes out"),
    CASE(dims=(50,), num_shards=1, reason="one shard"),
    CASE(dims=(2,), num_shards=50, reason="one token at a time"),
    CASE(dims=(50,), fused=True, reason="gate and up are halves of one weight"),
    CASE(dims=(50,), frozen=("x",), reason="no dx: the buffer of h lives on"),
    CASE(dims=(50,), frozen=("w_gate", "w_up", "w_down"), reason="dx alone"),
    CASE(dims=(4, 20), x_layout="transposed", dy_layout="transposed", reason="rows that oneDNN would have to copy"),
    CASE(dims=(4, 20), x_layout="sliced", dy_layout="sliced", reason="rows with gaps between them"),
]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """On any processor and for the smallest sizes; the shapes of the products that were made."""
    made: list[tuple[int, ...]] = []
    original = steps_onednn.product

    def product(a: Tensor, w: Tensor, *rest: Any, **options: Any) -> Tensor:
        made.append((*a.shape, w.shape[0]))
        return original(a, w, *rest, **options)

    monkeypatch.setattr(steps_onednn, "product", product)
    monkeypatch.setattr(steps_onednn, "pays_here", lambda: True)
    monkeypatch.setattr(steps_onednn, "SMALLEST", 0)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: MLPCase, everywhere: list[tuple[int, ...]]) -> None:
    """Value and every gradient within the tolerance of all float32."""
    assert_case(case, ADAPTERS["torch"].run(case, "eager"))
    assert everywhere


def test_an_unknown_layout_is_an_error() -> None:
    """It was taken for a contiguous one, so that a case asked for gaps between its rows and had none."""
    with pytest.raises(ValueError, match="a layout must be contiguous, sliced, transposed or expanded, got 'strided'"):
        ADAPTERS["torch"].run(CASE(dims=(4, 20), x_layout="strided", reason="unknown"))  # type: ignore[arg-type]


def operands(T: int, H: int, I: int, *, gated: bool = True) -> tuple[Tensor, list[Tensor | None]]:  # noqa: E741
    torch.manual_seed(0)
    x = torch.randn(T, H, requires_grad=True)
    weights: list[Tensor | None] = [torch.randn(shape).requires_grad_() for shape in ((I, H), (I, H), (H, I))]
    return x, weights if gated else [None, *weights[1:]]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_flop(keep: float, gated: bool, everywhere: list[tuple[int, ...]]) -> None:
    x, weights = operands(128, 32, 96, gated=gated)
    with GemmFlop() as counter:
        tiled_mlp(x, *weights, num_shards=4, keep=keep).sum().backward()
    shape = mlp_costs.MLPShape(tokens=128, hidden=32, intermediate=96, gated=gated)
    assert counter.flop == mlp_costs.mlp_flop(shape, plan_tokens(128, num_shards=4), keep=keep)
    assert everywhere


def test_pytorchs_own_counter_sees_these_products(everywhere: list[tuple[int, ...]]) -> None:
    x, weights = operands(128, 32, 96)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tiled_mlp(x, *weights, num_shards=4)
    assert counter.get_total_flops() == 6 * 128 * 32 * 96
    a, w, added = torch.randn(8, 4), torch.randn(6, 4), torch.randn(8, 6)
    with FlopCounterMode(display=False) as counter:
        steps_onednn.product(a, w, added=added)
        steps_onednn.product(a, w, torch.randn(6))
    assert counter.get_total_flops() == 2 * (2 * 8 * 4 * 6)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("T", [4096, 16384])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_peak_bytes(keep: float, T: int, gated: bool, everywhere: list[tuple[int, ...]]) -> None:
    """Those of the buffers that other products write into, exactly, though here each product brings its own."""
    x, weights = operands(T, 48, 96, gated=gated)
    shape, plan = mlp_costs.MLPShape(tokens=T, hidden=48, intermediate=96, gated=gated), ShardPlan(T, 1024)
    with LiveBytes() as counted:
        y = tiled_mlp(x, *weights, tiling=Tiling(shard_tokens=1024, keep=keep))
        y.sum().backward()
    results = [y, *(leaf.grad for leaf in (x, *weights) if leaf is not None and leaf.grad is not None)]
    expected = mlp_costs.peak_bytes(shape, plan) + mlp_costs.saved_bytes(shape, plan, keep=keep)
    found = counted.peak_above(results)
    assert everywhere
    assert abs(found - expected) <= COST_BYTES * expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_without_gradients(mode: Any, everywhere: list[tuple[int, ...]]) -> None:
    x, weights = operands(64, 32, 96)
    expected = tiled_mlp(x, *weights, num_shards=4)
    before = len(everywhere)
    with mode():
        found = tiled_mlp(x, *weights, num_shards=4)
    assert len(everywhere) > before
    assert torch.equal(found, expected)


def test_nan_and_infinity_pass_through(everywhere: list[tuple[int, ...]]) -> None:
    x, weights = operands(64, 32, 96)
    with torch.no_grad():
        x[3, 5], x[17, 2] = torch.nan, torch.inf
    y = tiled_mlp(x, *weights, num_shards=4)
    y.sum().backward()
    bad = torch.zeros(64, dtype=torch.bool)
    bad[[3, 17]] = True
    assert everywhere
    assert torch.equal(~y.isfinite().all(1), bad)
    assert torch.equal(~x.grad.isfinite().all(1), bad)


def chosen(
    steps: str = "eager", dtype: torch.dtype = torch.float32, hidden: int = 512, out: int = 512, x: Tensor | None = None
) -> Steps:
    """Of a call of 4096 tokens; nothing is computed, so that the operands need no memory."""
    w = Weights(None, torch.empty(1).expand(1024, hidden), torch.empty(1).expand(out, 1024))
    x = torch.empty(1).expand(4096, hidden) if x is None else x
    return steps_for(steps, x, w, ShardPlan(4096, 1024), dtype)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # by torch's own context manager
def test_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_onednn, "pays_here", lambda: True)
    assert isinstance(chosen(), steps_onednn.OneDNNSteps)
    assert chosen() is not chosen()  # each knows the buffers of one call
    assert chosen(dtype=torch.bfloat16) is EAGER
    assert chosen(dtype=torch.float64) is EAGER
    assert chosen(hidden=514) is EAGER  # rows of dx would be more bytes than the buffers
    assert chosen(out=514) is EAGER
    assert chosen(hidden=8, out=8) is EAGER  # too small to pay
    with torch.backends.mkldnn.flags(enabled=False):
        assert chosen() is EAGER
    assert chosen(x=TwoTensor(torch.ones(4096, 512), torch.ones(4096, 512))) is EAGER
    assert type(chosen("deterministic")).__name__ == "KernelSteps"  # others' products are theirs
    monkeypatch.setattr(steps_onednn, "pays_here", lambda: False)
    assert chosen() is EAGER


@pytest.mark.parametrize(
    ("facts", "capability", "pays"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("vendor_id\t: GenuineIntel\n", "AVX512", False),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", False),
        (None, "AVX512", False),
    ],
)
def test_what_is_asked_of_the_machine(
    facts: str | None, capability: str, pays: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    path = tmp_path / "cpuinfo"
    if facts is not None:
        path.write_text(facts)
    monkeypatch.setattr(steps_onednn, "_FACTS", path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert steps_onednn.pays_here.__wrapped__() is pays


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_under_torch_compile(keep: float, gated: bool, everywhere: list[tuple[int, ...]]) -> None:
    """The registered operators make the same products: to the last bit those of a call outside."""
    x, weights = operands(64, 32, 96, gated=gated)

    def step(x: Tensor) -> Tensor:
        return tiled_mlp(x, *weights, num_shards=4, keep=keep).square().sum()

    torch.compiler.reset()
    leaves = [x, *(w for w in weights if w is not None)]
    expected = torch.autograd.grad(step(x), leaves)
    outside = len(everywhere)
    found = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), leaves)
    assert len(everywhere) == 2 * outside > 0
    assert all(map(torch.equal, found, expected))

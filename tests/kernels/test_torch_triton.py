"""Every case of the specification through the Triton kernels, in the interpreter: values and gradients.

float64 is not among the kernels' dtypes. Which kernels make an MLP is tried in all ways that the table can choose.
"""

import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import tests.triton_interpreter  # noqa: F401
from shared_specs.config import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.errors import UnsupportedError
from shared_specs.kernels.blocks import DETERMINISTIC, UNMEASURED, Paths
from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp.cases import MLP_CASES, MLPCase
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import COST_BYTES, limit
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.core.torch_counting import LiveBytes
from tiled_torch import TiledLinearCrossEntropy, TiledMLP, tiled_linear_cross_entropy, tiled_mlp
from tiled_torch.backends import last_run, usable_backends
from tiled_torch.core import launch
from tiled_torch.mlp import steps_kernels

# The interpreter computes with NumPy, which warns where a GPU just returns infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def one_of_each(cases: Sequence[Any], *others: str) -> list[Any]:
    """Of the cases that differ in nothing a kernel is given, the first. others: fields of which kernels see no more."""
    names = [field.name for field in fields(cases[0]) if field.name not in ("seed", "reason", *others)]
    chosen: dict[Any, Any] = {}
    for case in cases:
        if case.dtype != "float64":
            chosen.setdefault(tuple(getattr(case, name) for name in names), case)
    return list(chosen.values())


# tests/*/test_both_*.py have the plans, layouts and frozen operands; the library's products are the same there.
# Activations are computed in float32 in every dtype.
IN_EVERY_DTYPE = ("silu", "relu_squared")
MLPS = one_of_each(
    [case for case in MLP_CASES if case.dtype == "float32" or case.activation in IN_EVERY_DTYPE],
    "dims",
    "num_shards",
    "keep",
    "x_layout",
    "dy_layout",
    "frozen",
)
# A program makes a row: ten tokens in shards of three and one.
LOSSES = [
    case if 0 in case.dims else replace(case, dims=(2, 5))
    for case in one_of_each(LOSS_CASES, "dims", "num_shards", "ignored", "bias", "num_valid", "upstream", "frozen")
]
PATHS = {
    "default": UNMEASURED,
    "dgated": Paths(down="dgated"),
    "auxiliary": Paths(up="auxiliary"),
    "dual": Paths(up="dual"),
    "weight_gradient": Paths(weight_gradient="kernel"),
    "every product": DETERMINISTIC,
}


@pytest.mark.parametrize("case", MLPS, ids=lambda case: case.id)
def test_mlp_case(case: MLPCase) -> None:
    results = ADAPTERS["torch"].run(case, "triton")
    assert last_run("tiled_mlp") == "triton"
    assert_case(case, results)


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_loss_case(case: LossCase) -> None:
    results = ADAPTERS["torch"].run_loss(case, "triton")
    assert last_run("tiled_linear_cross_entropy") == "triton"
    assert_case(case, results)


WAYS = [(paths, "float32") for paths in PATHS]
WAYS += [(paths, dtype) for paths in ("dgated", "dual", "every product") for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize(("paths", "dtype"), WAYS)
def test_every_way_to_make_an_mlp(paths: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ragged, biased case that keeps a shard, and one without a gate."""
    monkeypatch.setattr(steps_kernels, "paths_for", lambda *args: PATHS[paths])
    for gated, activation in ((True, "gelu"), (False, "relu_squared")):
        biases = ("gate", "up", "down") if gated else ("up", "down")
        case = MLPCase(
            dims=(150,), hidden=24, intermediate=40, gated=gated, activation=activation, biases=biases, dtype=dtype,
            num_shards=2, keep=0.5, reason=paths,
        )  # fmt: skip
        assert_case(case, ADAPTERS["torch"].run(case, "triton"))


def gradients(num_shards: int, dtype: torch.dtype, activation: str, *, gated: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens, hidden, width = 300, 24, 40
    x, up, gate = torch.randn(tokens, hidden), torch.randn(width, hidden) / 4, torch.randn(width, hidden) / 4
    down, bias, dy = torch.randn(hidden, width) / 4, torch.randn(width), torch.randn(tokens, hidden)
    leaves = [a.to(dtype).requires_grad_() for a in (x, up, down, bias, *([gate] if gated else []))]
    tiling = Tiling(num_shards=num_shards, deterministic=True)
    y = tiled_mlp(
        leaves[0], leaves[4] if gated else None, leaves[1], leaves[2], biases={"up": leaves[3]},
        activation=activation, tiling=tiling, backend="triton",
    )  # fmt: skip
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("dtype", "gated"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_deterministic_results_do_not_depend_on_the_number_of_shards(dtype, gated):
    whole = gradients(1, dtype, "silu", gated=gated)
    for num_shards in (2, 3):
        for found, expected in zip(gradients(num_shards, dtype, "silu", gated=gated), whole, strict=True):
            assert torch.equal(found, expected)


def test_a_wide_x_under_autocast_takes_blocks_of_the_products_dtype(monkeypatch):
    """A block of float32 results has twice the bytes, which the table's blocks of 16-bit products have no room for."""
    kinds = []

    def dx(*args):
        kinds.append({a.dtype for a in args if a is not None})
        return dx_kernel(*args)

    dx_kernel = steps_kernels.dx_kernel
    monkeypatch.setattr(steps_kernels, "dx_kernel", dx)
    x, w_gate, w_up, w_down = (torch.randn(s).requires_grad_() for s in ((160, 16), (32, 16), (32, 16), (16, 32)))
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled_mlp(x, w_gate, w_up, w_down, tiling=Tiling(num_shards=2, deterministic=True), backend="triton")
        plain = tiled_mlp(x, w_gate, w_up, w_down, backend="eager")
    exact = tiled_mlp(x.double(), w_gate.double(), w_up.double(), w_down.double())
    found, rounded, truth = (torch.autograd.grad(a.double().sum(), x)[0] for a in (y, plain, exact))
    assert {dtype for kind in kinds for dtype in kind} == {torch.bfloat16}
    assert found.dtype == torch.float32
    allowed = limit(relative_error(rounded.double().numpy(), truth.double().numpy()), "bfloat16")
    assert relative_error(found.double().numpy(), truth.double().numpy()) <= allowed


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with pytest.raises(UnsupportedError, match=r"needs? compute capability 8\.0 or newer, this GPU has 7\.5\."):
        tiled_mlp(x, w, w, w, backend="triton")


def test_what_the_kernels_cannot_do_is_refused(monkeypatch):
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(x.double(), w.double(), w.double(), w.double(), backend="triton")
    assert str(caught.value) == (
        "tiled_mlp: backend must be usable here, got 'triton'. Its kernels compute float32, bfloat16 and float16, and "
        'this call is float64. Pass backend="auto".'
    )
    with pytest.raises(
        UnsupportedError, match=r"^tiled_mlp: deterministic must be False here, got True\. The eager backend's"
    ):
        tiled_mlp(x, w, w, w, tiling=Tiling(deterministic=True))
    monkeypatch.delenv("TRITON_INTERPRET")
    reason = "Its kernels need an NVIDIA GPU, and PyTorch finds none."
    if not torch.cuda.is_available():
        assert usable_backends()["triton"] == reason
        for call in (
            lambda: tiled_mlp(x, w, w, w, backend="triton"),
            lambda: tiled_linear_cross_entropy(x, w, torch.ones(4, dtype=torch.long), backend="triton"),
            lambda: TiledMLP(8, 12, backend="triton"),
            lambda: TiledLinearCrossEntropy(8, 12, backend="triton"),
        ):
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert reason in str(caught.value)


def test_auto_on_a_cpu_is_eager_even_in_the_interpreter():
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    tiled_mlp(x, w, w, w)
    assert last_run("tiled_mlp") == "eager"
    tiled_linear_cross_entropy(x, w, torch.ones(4, dtype=torch.long))
    assert last_run("tiled_linear_cross_entropy") == "eager"


@pytest.mark.deep_but(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
@pytest.mark.parametrize("op", ["mlp", "loss"])
def test_kernels_run_under_compile(op):
    torch.manual_seed(0)
    x, w, up = (torch.randn(shape, requires_grad=True) for shape in ((20, 16), (24, 16), (24, 16)))
    targets = torch.arange(20)

    def run(x, w, up):
        if op == "mlp":
            return tiled_mlp(x, w, up, up.T, num_shards=2, keep=0.5, backend="triton").square().sum()
        return tiled_linear_cross_entropy(x, w, targets, loss=LossOptions(z_loss=0.1), backend="triton")

    torch.compiler.reset()
    expected = torch.autograd.grad(run(x, w, up), [x, w])
    found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(x, w, up), [x, w])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


PRODUCTS = {
    "dual_kernel": 2,
    "auxiliary_kernel": 1,
    "dgated_kernel": 1,
    "linear_kernel": 1,
    "weight_gradient_kernel": 1,
}


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_flop_of_the_kernels(keep, monkeypatch):
    """22 - 4 keep THI, by the sizes that every launch was given."""
    flop, start = [0], launch.start

    def counted(kernel, programs, *args, **constants):
        given = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False))
        name = kernel.fn.__name__
        if name in PRODUCTS or name == "dx_kernel":
            products = PRODUCTS.get(name) or (2 if constants["GATED"] else 1)
            depth = given["T"] if name == "weight_gradient_kernel" else given["K"]
            flop[0] += products * 2 * given["M"] * given["N"] * depth
        start(kernel, programs, *args, **constants)

    monkeypatch.setattr(launch, "start", counted)
    x, w, dy = torch.randn(256, 24, requires_grad=True), torch.randn(32, 24, requires_grad=True), torch.randn(256, 24)
    tiling = Tiling(num_shards=2, keep=keep, deterministic=True)
    tiled_mlp(x, w, w, w.T, tiling=tiling, backend="triton").backward(dy)
    shape = mlp_costs.MLPShape(tokens=256, hidden=24, intermediate=32)
    assert flop[0] == mlp_costs.mlp_flop(shape, ShardPlan(256, 128), keep=keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_peak_bytes_of_the_kernels(dtype):
    """Three buffers [t, I], and for 16-bit weights their float32 sums; no elementwise temporaries."""
    tokens, hidden, width = 1024, 16, 96
    x, dy = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    weights = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((width, hidden), (width, hidden), (hidden, width))
    ]
    y = tiled_mlp(x, *weights, tiling=Tiling(shard_tokens=512, deterministic=True), backend="triton")
    with LiveBytes() as live:
        torch.autograd.grad(y, weights, dy)
    shape = mlp_costs.MLPShape(
        tokens=tokens, hidden=hidden, intermediate=width, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize
    )
    gradients = sum(w.numel() * w.itemsize for w in weights)
    # the interpreter's own copies of a CPU's tensors are not made of tensors, so they are not seen
    predicted = mlp_costs.peak_bytes(shape, ShardPlan(tokens, 512), device="gpu", kernels=True)
    assert abs(live.peak - gradients - predicted) <= COST_BYTES * predicted

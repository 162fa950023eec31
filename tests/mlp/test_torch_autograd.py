"""The autograd contract of the PyTorch MLP: gradcheck, autocast, compile, checkpointing, main_grad, misuse."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs import SpecError, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32, limit
from tests.mlp.test_torch_exact import operands
from tiled_torch import TiledMLP, backends, tiled_linear_cross_entropy, tiled_loss, tiled_mlp


def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def error(a: Tensor, b: Tensor) -> float:
    return relative_error(a.detach().double().numpy(), b.detach().double().numpy())


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_gradcheck(activation: Any, keep: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    shapes = ((4, 3), (4, 3), (2, 4), (4,), (4,), (2,))
    params = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def call(x: Tensor, *p: Tensor) -> Tensor:
        biases = dict(zip(("gate", "up", "down"), p[3:], strict=True))
        return tiled_mlp(x, *p[:3], biases=biases, activation=activation, num_shards=4, keep=keep)

    assert torch.autograd.gradcheck(call, (x, *params))


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_two_backwards_and_accumulation(keep: float) -> None:
    """retain_graph: what was kept is not destroyed by the first backward; two batches add up."""
    x, weights = operands(32, torch.float64)
    y = tiled_mlp(x, *weights, num_shards=4, keep=keep)
    first = torch.autograd.grad(y.square().sum(), [x, *weights], retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for _ in range(2):
        tiled_mlp(x, *weights, num_shards=4, keep=keep).square().sum().backward()
    for leaf, grad in zip((x, *weights), first, strict=True):
        assert error(leaf.grad, 2 * grad) <= DISTRIBUTED_FLOAT64


def test_gradients_are_bit_stable() -> None:
    x, weights = operands(96)
    runs = [torch.autograd.grad(tiled_mlp(x, *weights, num_shards=5).sum(), [x, *weights]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_create_graph_is_refused() -> None:
    x, weights = operands(8)
    with pytest.raises(UnsupportedError) as caught:
        torch.autograd.grad(tiled_mlp(x, *weights).sum(), [x], create_graph=True)
    assert str(caught.value) == (
        "tiled_mlp: create_graph must be False in backward, got True. The hand-written backward has no second "
        "derivative; differentiate the untiled MLP, or use tiled_jax."
    )


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "vjp": lambda fn, x: torch.func.vjp(fn, x),
    "vmap": lambda fn, x: torch.func.vmap(fn)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("kind", ["mlp", "functional_call", "loss", "generic loss"])
def test_torch_func_is_refused(kind: str, transform: Any) -> None:
    x, weights = operands(8)
    module, targets = TiledMLP(x.shape[-1], 4), torch.zeros(8, dtype=torch.long)
    name, untiled, fn = {
        "mlp": ("tiled_mlp", "the untiled MLP", lambda x: tiled_mlp(x, *weights)),
        "functional_call": (
            "tiled_mlp",
            "the untiled MLP",
            lambda x: torch.func.functional_call(module, dict(module.named_parameters()), (x,)),
        ),
        "loss": (
            "tiled_linear_cross_entropy",
            "the untiled loss",
            lambda x: tiled_linear_cross_entropy(x, weights[0], targets),
        ),
        "generic loss": ("tiled_loss", "fn", lambda x: tiled_loss(lambda x: x.sin().sum(), x)),
    }[kind]
    with pytest.raises(UnsupportedError) as caught:
        transform(fn, x.detach().to(torch.float32))
    assert str(caught.value) == (
        f"{name}: this call is inside torch.func. Differentiate {untiled} itself, or use tiled_jax."
    )


def test_functional_call_alone_is_allowed() -> None:
    x, weights = operands(8, torch.float64)
    module = TiledMLP(x.shape[-1], weights[0].shape[0], dtype=x.dtype)
    found = torch.func.functional_call(module, dict(zip(("w_gate", "w_up", "w_down"), weights, strict=True)), (x,))
    assert error(found, plain(x, *weights)) <= DISTRIBUTED_FLOAT64


def test_in_place_change_is_noticed() -> None:
    x, weights = operands(8)
    y = tiled_mlp(x, *weights)
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_requires_grad() -> None:
    x, weights = operands(8)
    y = tiled_mlp(x.detach(), *(w.detach() for w in weights))
    assert not y.requires_grad
    with torch.no_grad():
        assert not tiled_mlp(x, *weights).requires_grad
    assert tiled_mlp(x, *weights).requires_grad


def test_result_is_not_a_view() -> None:
    """FSDP2 would lose its hook on an in-place change of a view."""
    x, weights = operands(8)
    assert not tiled_mlp(x[None], *weights)._is_view()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(x_dtype: torch.dtype) -> None:
    """As nn.Linear under autocast: bfloat16 products and output, gradients in the operands' own dtypes."""
    x, weights = operands(64)
    x = x.detach().to(x_dtype).requires_grad_()
    truth = torch.autograd.grad(plain(*(a.double() for a in (x, *weights))).sum(), [x, *weights])
    with torch.autocast("cpu", torch.bfloat16):
        y, reference = tiled_mlp(x, *weights, num_shards=4), plain(x, *weights)
    assert y.dtype == reference.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.sum(), [x, *weights])  # outside autocast: the dtypes recorded in forward count
    theirs = torch.autograd.grad(reference.sum(), [x, *weights])
    for ours, plain_grad, exact, leaf in zip(grads, theirs, truth, (x, *weights), strict=True):
        assert ours.dtype == leaf.dtype
        assert error(ours, exact) <= limit(error(plain_grad, exact), "bfloat16")


def test_autocast_leaves_float64_alone() -> None:
    x, weights = operands(8, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert tiled_mlp(x, *weights).dtype == torch.float64


def test_autocast_does_not_mend_float64_beside_float32() -> None:
    x, weights = operands(8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SpecError) as caught:
        tiled_mlp(x.double(), *weights)
    assert str(caught.value) == "tiled_mlp: w_gate must be of x's dtype float64, got float32. Cast one of them."


# Raised inside torch's own tracer and compiler.
tracing = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.deep_but(1)
@tracing
@pytest.mark.parametrize(("backend", "keep"), [("aot_eager", 0.0), ("aot_eager", 0.5), ("inductor", 0.5)])
def test_compile_fullgraph(backend: str, keep: float) -> None:
    """Inductor, which runs a C++ compiler for each, compiles one length, in this process."""
    x, weights = operands(33, torch.float64)

    def block(x: Tensor, *weights: Tensor) -> Tensor:
        return x + tiled_mlp(torch.sin(x), *weights, num_shards=4, keep=keep)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=False)
    longer = torch.randn(40, x.shape[-1], dtype=torch.float64, requires_grad=True)
    # A second length is compiled again: the first one's plan must not be taken for it.
    for each in (x, longer) if backend == "aot_eager" else (x,):
        with torch._inductor.config.patch(compile_threads=1):
            ours, eager = compiled(each, *weights), block(each, *weights)
            assert error(ours, eager) <= DISTRIBUTED_FLOAT64
            grads = torch.autograd.grad(ours.square().sum(), [each, *weights])
        expected = torch.autograd.grad(eager.square().sum(), [each, *weights])
        assert all(error(a, b) <= DISTRIBUTED_FLOAT64 for a, b in zip(grads, expected, strict=True))


@tracing
def test_compile_fullgraph_with_a_length_that_became_dynamic() -> None:
    """As torch.compile does by itself from the second length on."""
    x, weights = operands(33, torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(tiled_mlp, fullgraph=True, backend="aot_eager")
    for each in (x, torch.randn(40, x.shape[-1], dtype=torch.float64)):
        assert error(compiled(each, *weights), plain(each, *weights)) <= DISTRIBUTED_FLOAT64


@tracing
def test_compile_module_with_frozen_weight() -> None:
    torch.manual_seed(0)
    module = TiledMLP(8, 12, bias=True, fused_gate_up=True, num_shards=3, dtype=torch.float64)
    module.w_down.requires_grad_(False)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    eager = torch.autograd.grad(module(x).square().sum(), [module.w_gate_up, module.b_down])
    torch.compiler.reset()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    grads = torch.autograd.grad(y.square().sum(), [module.w_gate_up, module.b_down])
    assert all(error(a, b) <= DISTRIBUTED_FLOAT64 for a, b in zip(grads, eager, strict=True))


@tracing
def test_compile_around_a_checkpoint() -> None:
    """In one graph, as a user compiles a recomputed block of their own; the backend is noted when it is compiled."""
    x, weights = operands(9, torch.float64)
    head, targets = torch.randn(11, x.shape[-1], dtype=torch.float64), torch.arange(9)

    def block(x: Tensor, *weights: Tensor) -> Tensor:
        y = tiled_mlp(x, *weights, num_shards=2)
        return tiled_linear_cross_entropy(y, head, targets.reshape(y.shape[:-1]), num_shards=2)

    def recomputed(x: Tensor, *weights: Tensor) -> Tensor:
        return checkpoint(block, x, *weights, use_reentrant=False)

    expected = torch.autograd.grad(block(x, *weights), [x, *weights])
    for function in ("tiled_mlp", "tiled_linear_cross_entropy"):
        backends.record_run(function, "nothing")
    torch.compiler.reset()
    loss = torch.compile(recomputed, fullgraph=True, backend="aot_eager")(x, *weights)
    assert {backends.last_run(f) for f in ("tiled_mlp", "tiled_linear_cross_entropy")} == {"eager"}
    grads = torch.autograd.grad(loss, [x, *weights])
    assert all(error(a, b) <= DISTRIBUTED_FLOAT64 for a, b in zip(grads, expected, strict=True))


def test_registered_operators() -> None:
    """Fake implementations agree with the real ones."""
    from tiled_torch.mlp import compiled as mlp_compiled

    x, weights = operands(33)
    detached = [a.detach() for a in (x, *weights)]
    x, gate, up, down = detached
    none = (None, None, None)
    options = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        mlp_compiled.forward, (x, gate, up, down, *none, None, None, x.dtype, "silu", 8, "eager"), test_utils=options
    )
    torch.library.opcheck(mlp_compiled.kept, (x, gate, up, down, *none, x.dtype, 8, "eager", 16), test_utils=options)
    args = (x, x, gate, up, down, *none, None, None, "silu", 8, "eager", [True] * 4 + [False] * 3)
    torch.library.opcheck(mlp_compiled.backward, args, test_utils=options)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_under_checkpointing(keep: float, reentrant: bool) -> None:
    x, weights = operands(32, torch.float64)

    def block(x: Tensor, mlp: Any) -> Tensor:
        return x + mlp(F.layer_norm(x, (32,)), *weights)

    expected = torch.autograd.grad(block(x, plain).square().sum(), [x, *weights])

    def tiled(*args: Tensor) -> Tensor:
        return tiled_mlp(*args, num_shards=4, keep=keep)

    checkpoint(block, x, tiled, use_reentrant=reentrant).square().sum().backward()
    for leaf, grad in zip((x, *weights), expected, strict=True):
        assert error(leaf.grad, grad) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flagged", [True, False])
def test_main_grad_takes_the_gradient(dtype: torch.dtype, flagged: bool) -> None:
    """Gradient-accumulation fusion: added in float32 to main_grad, `.grad` untouched or a placeholder."""
    x, weights = operands(64, dtype)
    expected = torch.autograd.grad(tiled_mlp(x, *weights, num_shards=4).sum(), weights)
    for w in weights:
        w.main_grad = torch.ones(w.shape)
        if flagged:
            w.grad_added_to_main_grad = False
    for _ in range(2):
        tiled_mlp(x, *weights, num_shards=4).sum().backward()
    for w, grad in zip(weights, expected, strict=True):
        assert error(w.main_grad - 1, 2 * grad) <= limit(0.0 if dtype == torch.float32 else 4e-3, "bfloat16")
        if flagged:
            assert w.grad_added_to_main_grad
            assert w.grad is not None
        else:
            assert w.grad is None


@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_grad_of_16_bits_is_rounded_once(dtype: torch.dtype, weights_in: torch.dtype) -> None:
    """The sum over 32 shards is that of a float32 main_grad, added to what was there and rounded there once."""
    x, weights = operands(64, weights_in)
    for w in weights:
        w.main_grad = torch.zeros(w.shape)
    tiled_mlp(x, *weights, num_shards=32).sum().backward()
    exact = [w.main_grad for w in weights]
    for w in weights:
        w.main_grad = torch.full(w.shape, 3.0, dtype=dtype)
    tiled_mlp(x, *weights, num_shards=32).sum().backward()
    for w, sums in zip(weights, exact, strict=True):
        assert torch.equal(w.main_grad, (sums + 3).to(dtype))
        assert w.grad is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("flagged", [True, False])
def test_main_grad_of_a_fused_parameter(flagged: bool, bias: bool) -> None:
    """Both halves are added to theirs of its main_grad, and its own flag is set."""
    mlp, x = TiledMLP(6, 10, fused_gate_up=True, bias=bias, num_shards=4).double(), torch.randn(33, 6).double()
    expected = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    for parameter in mlp.parameters():
        parameter.main_grad = torch.ones(parameter.shape, dtype=torch.float64)
        if flagged:
            parameter.grad_added_to_main_grad = False
    for _ in range(2):
        mlp(x).sum().backward()
    for parameter, grad in zip(mlp.parameters(), expected, strict=True):
        assert error(parameter.main_grad - 1, 2 * grad) <= DISTRIBUTED_FLOAT64
        assert getattr(parameter, "grad_added_to_main_grad", None) is (True if flagged else None)
        assert (parameter.grad is not None) == flagged


@tracing
@pytest.mark.parametrize("fused", [False, True])
def test_main_grad_is_refused_in_a_whole_graph(fused: bool) -> None:
    mlp, x = TiledMLP(6, 10, fused_gate_up=fused, num_shards=4), torch.randn(33, 6)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"main_grad must be None under torch\.compile"):
        torch.compile(mlp, backend="eager", fullgraph=True)(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda a: F.relu(a).square(),
}


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_pass_through(activation: Any, value: float, keep: float) -> None:
    """Where the plain MLP has NaN or an infinity, and nowhere else; every other value is the plain one's."""
    x, (gate, up, down) = operands(16, torch.float64)
    with torch.no_grad():
        x[3, 2] = value
    leaves = [x, gate, up, down]
    y = tiled_mlp(*leaves, activation=activation, num_shards=4, keep=keep)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up), down)
    assert not expected.isfinite().all()
    ours = [y, *torch.autograd.grad(y.sum(), leaves)]
    theirs = [expected, *torch.autograd.grad(expected.sum(), leaves)]
    exact = {"rtol": DISTRIBUTED_FLOAT64, "atol": DISTRIBUTED_FLOAT64, "equal_nan": True}
    for name, a, b in zip(("y", "x", "w_gate", "w_up", "w_down"), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **exact, msg=lambda text, name=name: f"{name}: {text}")


def test_a_hook_changes_the_gradient_of_its_weight_alone() -> None:
    x, weights = operands(64)
    expected = torch.autograd.grad(tiled_mlp(x, *weights, num_shards=8).sum(), weights)
    weights[0].register_hook(lambda grad: 0.5 * grad)
    tiled_mlp(x, *weights, num_shards=8).sum().backward()
    for weight, grad, factor in zip(weights, expected, (0.5, 1.0, 1.0), strict=True):
        assert torch.equal(weight.grad, factor * grad)


def test_devices_must_agree() -> None:
    x, (gate, up, down) = operands(8)
    with pytest.raises(SpecError) as caught:
        tiled_mlp(x, gate, up, down.to("meta"))
    assert str(caught.value) == "tiled_mlp: w_down must be on x's device cpu, got meta."


def test_module_equals_separate_linears() -> None:
    torch.manual_seed(0)
    linears = [torch.nn.Linear(a, b) for a, b in ((16, 24), (16, 24), (24, 16))]
    biases = dict(zip(("gate", "up", "down"), (m.bias for m in linears), strict=True))
    module = TiledMLP.from_weights(*(m.weight for m in linears), biases=biases, num_shards=3)
    x = torch.randn(2, 5, 16)
    expected = linears[2](F.silu(linears[0](x)) * linears[1](x))
    assert error(module(x), expected) <= MODEL_FLOAT32
    assert module.w_up is linears[1].weight  # adopted, not copied


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hidden_size": 0}, "TiledMLP: hidden_size must be >= 1, got 0."),
        ({"keep": 2}, "TiledMLP: keep must be in [0, 1], got 2. It is the fraction of shards whose gate and up are kept."),
        ({"gated": False, "fused_gate_up": True}, "TiledMLP: fused_gate_up must be False without a gate, got True."),
        ({"num_shards": 0}, "TiledMLP: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose."),
    ],
    ids=["size", "keep", "fused", "shards"],
)  # fmt: skip
def test_module_refuses_bad_options(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        TiledMLP(**{"hidden_size": 8, "intermediate_size": 12, **arguments})
    assert str(caught.value) == text


def test_the_module_says_its_sizes() -> None:
    weights = torch.ones(12, 8), torch.ones(12, 8), torch.ones(8, 12)
    for module in (TiledMLP(8, 12), TiledMLP.from_weights(*weights)):
        assert "hidden_size=8, intermediate_size=12, gated, activation=silu" in repr(module)

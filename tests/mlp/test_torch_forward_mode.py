"""Tangents of forward mode: carried by the MLP, the loss and `TiledLinear`, refused over ranks; never dropped."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shared_specs import LossOptions, SpecError, Tiling, UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tiled_torch import LossResult, TiledLinear, tiled_linear_cross_entropy, tiled_mlp
from tiled_torch.mlp import steps_onednn
from tiled_torch.parallel import tensor_parallel_mlp, vocab_parallel_linear_cross_entropy

# PyTorch's first forward-mode derivative scripts formulas of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda a: F.relu(a).square(),
}


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def pushed(call: Any, operands: list[Tensor], directions: list[Tensor | None]) -> Any:
    """(value, tangent) of a call whose operands are dual where there is a direction."""
    with fw.dual_level():
        given = [a if d is None else fw.make_dual(a, d) for a, d in zip(operands, directions, strict=True)]
        found = call(*given)
        if isinstance(found, LossResult):
            return {name: fw.unpack_dual(a) for name, a in found._asdict().items() if a is not None}
        return {"": fw.unpack_dual(found)}


def assert_equal(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, pair in ours.items():
        for part, found, expected in zip(("value", "tangent"), pair, theirs[name], strict=True):
            if expected is None:
                assert found is None, (name, part)
            else:
                assert found is not None, (name, part)
                a, b = (each.detach().numpy() for each in (found, expected))
                assert_within(a, b, DISTRIBUTED_FLOAT64, f"{name} {part}")


@pytest.mark.parametrize("of", ["x", "weights", "all"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_mlp_carries_tangents(activation: Any, gated: bool, of: str) -> None:
    """They were dropped by oneDNN's products, and other products raised in PyTorch's words."""
    operands = draw((2, 5, 4), (6, 4), (6, 4), (3, 6), (6,), (6,), (3,))
    directions: list[Any] = draw(*(tuple(a.shape) for a in reversed(operands)))[::-1]
    directions = [d if of == "all" or (of == "x") == (i == 0) else None for i, d in enumerate(directions)]

    def tiled(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *b: Tensor) -> Tensor:
        biases = dict(zip(("gate", "up", "down"), b, strict=True))
        if not gated:
            biases.pop("gate")
        return tiled_mlp(x, gate if gated else None, up, down, biases=biases, activation=activation, num_shards=4)

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *b: Tensor) -> Tensor:
        act, u = ACTIVATIONS[activation], F.linear(x, up, b[1])
        return F.linear(act(F.linear(x, gate, b[0])) * u if gated else act(u), down, b[2])

    assert_equal(pushed(tiled, operands, directions), pushed(plain, operands, directions))


def test_tangents_survive_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_onednn, "pays_here", lambda: True)
    monkeypatch.setattr(steps_onednn, "SMALLEST", 0)
    x, up, down, dx = draw((6, 4), (8, 4), (4, 8), (6, 4), dtype=torch.float32)
    found = pushed(lambda x: tiled_mlp(x, None, up, down, num_shards=2), [x], [dx])
    assert found[""].tangent.abs().max() > 0


@pytest.mark.parametrize("activation", ["relu_squared", "gelu_tanh"])
def test_gradients_of_tangents(activation: Any) -> None:
    """Reverse mode through the tangent, as a Hessian-vector product takes it."""
    operands = [a.requires_grad_() for a in draw((5, 4), (6, 4), (6, 4), (4, 6))]
    directions = draw((5, 4), (6, 4), (6, 4), (4, 6))

    def gradients(call: Any) -> Any:
        pair = pushed(call, operands, directions)[""]
        return torch.autograd.grad(pair.tangent.square().sum() + pair.primal.sum(), operands)

    def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up), down)

    ours = gradients(lambda *a: tiled_mlp(*a, activation=activation, num_shards=3))
    for found, expected in zip(ours, gradients(plain), strict=True):
        assert_within(found.numpy(), expected.numpy(), DISTRIBUTED_FLOAT64, "gradient")


V = 11
LOSSES = {
    "mean": LossOptions(),
    "smooth": LossOptions(label_smoothing=0.2, z_loss=0.1, logit_scale=0.7, logit_softcap=3.0, reduction="sum"),
    "weights": LossOptions(class_weight=torch.linspace(0.5, 2, V).double(), label_smoothing=0.3, num_valid=7),
    "outputs": LossOptions(outputs=("log_probs", "lse", "entropy", "accuracy"), reduction="none"),
}


def untiled(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, o: LossOptions) -> Any:
    """The loss by PyTorch's own functions."""
    z, valid = F.linear(x, weight, bias) * o.logit_scale, targets != o.ignore_index
    z = z if o.logit_softcap is None else o.logit_softcap * torch.tanh(z / o.logit_softcap)
    lse = z.logsumexp(-1)
    each = F.cross_entropy(
        z.flatten(0, -2), targets.flatten(), o.class_weight, label_smoothing=o.label_smoothing, reduction="none"
    )
    each = each.view(targets.shape) + o.z_loss * lse.square() * valid
    if o.reduction != "none":
        divisor = 1 if o.reduction == "sum" else o.num_valid or valid.sum()
        return each.sum() / divisor
    log_p = z.log_softmax(-1)
    log_probs = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * valid
    right = ((z.argmax(-1) == targets) & valid).to(z.dtype).detach()
    return LossResult(each, log_probs, lse, -(log_p.exp() * log_p).sum(-1), right)


@pytest.mark.parametrize("vocab_shards", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_carries_tangents(name: str, vocab_shards: int) -> None:
    operands, loss = draw((2, 7, 4), (V, 4), (V,)), LOSSES[name]
    directions = draw((V,), (2, 7, 4), (V, 4))
    directions = [directions[1], directions[2], directions[0]]
    targets = torch.arange(14).reshape(2, 7) % V
    targets[0, :3] = -100
    tiling = Tiling(num_shards=3, vocab_shards=vocab_shards)

    def tiled(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return untiled(x, weight, bias, targets, loss)

    assert_equal(pushed(tiled, operands, directions), pushed(plain, operands, directions))


def test_no_tokens_carry_empty_tangents() -> None:
    x, up, down = draw((0, 4), (6, 4), (4, 6))
    assert pushed(lambda x: tiled_mlp(x, None, up, down), [x], [x])[""].primal.shape == (0, 4)
    none = torch.zeros(0, dtype=torch.long)
    assert pushed(lambda w: tiled_linear_cross_entropy(x, w, none), [up], [up])[""].primal == 0


def test_tangents_of_class_weights_are_refused() -> None:
    x, weight, classes = draw((5, 4), (V, 4), (V,))
    with pytest.raises(SpecError) as caught:
        pushed(
            lambda c: tiled_linear_cross_entropy(x, weight, torch.arange(5), loss=LossOptions(class_weight=c)),
            [classes],
            [classes],
        )
    assert str(caught.value) == (
        "tiled_linear_cross_entropy: loss.class_weight has a tangent, which a loss does not carry. Detach it."
    )


def test_kernels_that_were_named_are_refused() -> None:
    x, up, down = draw((5, 4), (6, 4), (4, 6), dtype=torch.float32)
    targets = torch.arange(5)
    calls = {
        "tiled_mlp": lambda x: tiled_mlp(x, None, up, down, backend="triton"),
        "tiled_linear_cross_entropy": lambda x: tiled_linear_cross_entropy(x, up, targets, backend="triton"),
    }
    for name, call in calls.items():
        call(x)  # which runs, in the interpreter
        with pytest.raises(UnsupportedError) as caught:
            pushed(call, [x], [x])
        assert str(caught.value) == (
            f"{name}: backend must be eager in forward mode, got 'triton'. Tangents are PyTorch's own; pass "
            'backend="auto".'
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [False, True], ids=["", "gradients"])
def test_tiled_linear_carries_tangents(wanted: bool, dtype: torch.dtype) -> None:
    """16-bit inputs that need a gradient went through nodes without a formula for tangents."""
    torch.manual_seed(0)
    tiled = TiledLinear(6, 4, in_splits=2, out_splits=2, dtype=dtype).requires_grad_(wanted)
    (x, dx) = draw((3, 6), (3, 6), dtype=dtype)
    tangent = pushed(tiled, [x.requires_grad_(wanted)], [dx])[""].tangent
    expected = pushed(tiled.to_linear().double(), [x.double()], [dx.double()])[""].tangent
    allowed = DISTRIBUTED_FLOAT64 if dtype == torch.float64 else limit(torch.finfo(dtype).eps, "bfloat16")
    assert_within(tangent.detach().double().numpy(), expected.detach().numpy(), allowed, "tangent")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A simulation of two of them: what is refused is refused before anything is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wanted", [False, True], ids=["", "gradients"])
def test_ranks_refuse_tangents(wanted: bool, two_ranks: None) -> None:
    x, up, down = (a.requires_grad_(wanted) for a in draw((6, 4), (6, 4), (4, 6)))
    calls = {
        ("tensor_parallel_mlp", "MLP"): lambda x: tensor_parallel_mlp(x, None, up, down),
        ("vocab_parallel_linear_cross_entropy", "loss"): lambda x: vocab_parallel_linear_cross_entropy(
            x, up, torch.arange(6)
        ),
    }
    for (name, what), call in calls.items():
        with pytest.raises(UnsupportedError) as caught:
            pushed(call, [x], [torch.ones_like(x)])
        assert str(caught.value) == (f"{name}: this call is in forward mode. Differentiate the untiled {what} itself.")

"""Liger Kernel's names: values and gradients against formulas written out here, its conventions, keys and errors."""

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import SpecError, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, FACTOR
from tiled_torch.compat.liger import (
    CrossEntropyOutput,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
    apply_tiled_mlp,
    liger_fused_linear_cross_entropy,
)

T, H, V, IGNORED = 13, 6, 11, 3


def config(act: str) -> Any:
    return SimpleNamespace(hidden_size=H, intermediate_size=10, hidden_act=act)


def untiled(mlp: Any, x: Tensor) -> Tensor:
    gate = mlp.gate_proj(x)
    acted = F.silu(gate) if isinstance(mlp, LigerTiledSwiGLUMLP) else F.gelu(gate, approximate="tanh")
    return mlp.down_proj(acted * mlp.up_proj(x))


def results(fn: Any, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The result of fn and the gradients of x and of the parameters, for one upstream gradient."""
    x = x.detach().requires_grad_()
    y = fn(x)
    upstream = torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], upstream)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert relative_error(one.numpy(), other.numpy()) <= DISTRIBUTED_FLOAT64


MLPS = [(LigerTiledSwiGLUMLP, "silu"), (LigerTiledSwiGLUMLP, "swish")]
MLPS += [(LigerTiledGEGLUMLP, act) for act in ("gelu", "gelu_new", "gelu_pytorch_tanh")]


@pytest.mark.parametrize(("kind", "act"), MLPS)
@pytest.mark.parametrize("shards", [None, 0, 4])
def test_gated_mlps(kind: Any, act: str, shards: int | None) -> None:
    torch.manual_seed(0)
    mlp = kind(config(act), num_shards=shards).double()
    for x in (torch.randn(2, 7, H, dtype=torch.float64), torch.randn(5, H, dtype=torch.float64)):
        parameters = list(mlp.parameters())
        assert_alike(results(mlp, x, parameters), results(lambda a: untiled(mlp, a), x, parameters))


def test_keys_attributes_and_refusals() -> None:
    mlp = LigerTiledSwiGLUMLP(config("silu"))
    assert list(mlp.state_dict()) == [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    assert (mlp.hidden_size, mlp.intermediate_size, mlp.num_shards) == (H, 10, None)
    assert LigerTiledGEGLUMLP(SimpleNamespace(hidden_size=4, intermediate_size=8)).down_proj.bias is None
    text = "LigerTiledSwiGLUMLP: config.hidden_act must be one of silu, swish, got 'gelu'."
    with pytest.raises(ValueError, match=re.escape(text)):
        LigerTiledSwiGLUMLP(config("gelu"))
    with pytest.raises(ValueError, match=r"LigerTiledGEGLUMLP: config\.hidden_act"):
        LigerTiledGEGLUMLP(config("silu"))


def test_adapters_in_place_of_projections_are_called() -> None:
    torch.manual_seed(0)
    mlp = LigerTiledSwiGLUMLP(config("silu"), num_shards=3).double()
    mlp.up_proj = nn.Sequential(nn.Linear(H, 2), nn.Linear(2, 10)).double()  # type: ignore[assignment]
    x, parameters = torch.randn(2, 7, H, dtype=torch.float64), list(mlp.parameters())
    assert_alike(results(mlp, x, parameters), results(lambda a: untiled(mlp, a), x, parameters))


@pytest.mark.parametrize("named", [False, True])
def test_apply_tiled_mlp(named: bool) -> None:
    """Any function of a module; each parameter's hook runs once, and of a shard at a time."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(H, 9), nn.Tanh(), nn.Linear(9, H)).double()
    x, parameters, rows, hooks = torch.randn(2, 7, H, dtype=torch.float64), list(module.parameters()), set(), []

    def fn(mlp: Any, x: Tensor) -> Tensor:
        rows.add(x.shape[:-1])
        return mlp(x)

    given = parameters if named else None
    found = results(lambda a: apply_tiled_mlp(fn, module, a, 4, given), x, parameters)
    assert_alike(found, results(module, x, parameters))
    assert (1, 4) in rows
    assert max(shape.numel() for shape in rows) == 4
    for parameter in parameters:
        parameter.register_hook(lambda d, parameter=parameter: hooks.append(id(parameter)))
    apply_tiled_mlp(fn, module, x, 4).sum().backward()
    assert sorted(hooks) == sorted(map(id, parameters))


def test_shards_that_liger_would_take() -> None:
    sizes: list[int] = []

    def fn(_: Any, x: Tensor) -> Tensor:
        sizes.append(x.shape[-2])
        return x

    with torch.no_grad():
        apply_tiled_mlp(fn, None, torch.ones(1, 20, 6))  # type: ignore[arg-type]
    assert sizes == [5] * 4  # ceil(20 / 6)
    with pytest.raises(TypeError, match="apply_tiled_mlp: compute_params must be None or parameters, got str"):
        apply_tiled_mlp(fn, nn.Identity(), torch.ones(1, 4, 6), 2, ["w"])  # type: ignore[list-item]


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, targets with one class of them ignored, and class weights."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(T, H), torch.randn(V, H), torch.randn(V)
    targets = torch.randint(0, V, (T,))
    targets[::4] = IGNORED
    return x.to(dtype), weight.to(dtype), bias.to(dtype), targets, torch.rand(V) + 0.2


def formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, given: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Liger Kernel's loss, z-loss, accuracy and predicted tokens, of whole logits."""
    reduction, classes, z = given.get("reduction", "mean"), given.get("ce_weight"), given.get("lse_square_scale", 0.0)
    logits = F.linear(x, weight, bias)
    if given.get("softcap"):
        logits = given["softcap"] * torch.tanh(logits / given["softcap"])
    valid = targets != IGNORED
    classes = None if classes is None else classes.to(x.dtype)
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": given.get("label_smoothing", 0.0)}
    losses = F.cross_entropy(logits, targets, classes, reduction="none", **options)
    z_losses = torch.where(valid, z * logits.logsumexp(-1).square(), 0.0)
    if reduction == "mean":
        weights = valid.to(x.dtype) if classes is None else classes[targets] * valid
        losses, z_losses = losses / weights.sum(), z_losses / valid.sum()
    total, predicted = losses + z_losses, logits.argmax(-1)
    if given.get("use_token_scaling"):
        scale = logits.softmax(-1).gather(1, targets[:, None])[:, 0].detach()
        total, z_losses = total * scale, z_losses * scale
    right = ((predicted == targets) & valid).to(x.dtype)
    accuracy = right if reduction == "none" else right.sum() / valid.sum()
    reduced = (a if reduction == "none" else a.sum() for a in (total, z_losses))
    return *reduced, accuracy, torch.where(valid, predicted, -1)


ALL: dict[str, Any] = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, smoothing": {"softcap": 2.0, "label_smoothing": 0.1},
    "z": {"lse_square_scale": 0.05},
    "z, classes": {"lse_square_scale": 0.05, "classes": True, "label_smoothing": 0.1},
    "scaling": {"use_token_scaling": True, "softcap": 3.0},
    "scaling, z, classes": {"use_token_scaling": True, "lse_square_scale": 0.05, "classes": True},
    "chunks": {"chunk_mem_const": 2},
    "sums": {"accum_dtype": torch.float32},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_loss(reduction: str, name: str, bias: bool) -> None:
    x, weight, b, targets, classes = problem()
    given: dict[str, Any] = {**CASES[name], "reduction": reduction, "ignore_index": IGNORED}
    given |= {"ce_weight": classes} if given.pop("classes", False) else {}
    leaves = [a.requires_grad_() for a in (weight, *((b,) if bias else ()))]
    b_or_none = b if bias else None

    def ours(a: Tensor) -> Tensor:
        plain = liger_fused_linear_cross_entropy(a, weight, targets, b_or_none, **given)
        found = liger_fused_linear_cross_entropy(a, weight, targets, b_or_none, **given, **ALL)
        assert isinstance(found, CrossEntropyOutput)
        assert isinstance(plain, Tensor)
        assert_alike([found.loss.detach()], [plain.detach()])
        rest.extend((found.z_loss, found.token_accuracy, found.predicted_tokens))
        return plain

    rest: list[Any] = []
    found = results(ours, x, leaves)
    assert_alike(found, results(lambda a: formula(a, weight, b_or_none, targets, given)[0], x, leaves))
    expected = formula(x, weight, b_or_none, targets, given)[1:]
    assert_alike([a.double() for a in rest], [a.detach().double() for a in expected])
    assert rest[2].dtype == torch.int64


def test_negative_class_weights() -> None:
    """Their sum over the targets may be negative; the z-loss is not divided by it."""
    x, weight, _, targets, classes = problem()
    given: dict[str, Any] = {"ce_weight": classes - 1.5, "lse_square_scale": 0.1}
    assert (classes - 1.5)[targets[targets != IGNORED]].sum() < 0
    found = results(
        lambda a: liger_fused_linear_cross_entropy(a, weight, targets, ignore_index=IGNORED, **given), x, []
    )  # type: ignore[arg-type]
    assert_alike(found, results(lambda a: formula(a, weight, None, targets, given)[0], x, []))


def test_module_and_function_of_the_same_call() -> None:
    x, weight, bias, targets, classes = problem()
    module = LigerFusedLinearCrossEntropyLoss(classes, IGNORED, 0.1, 0.2, "sum", 5.0, **ALL)
    found = module(weight, x, targets, bias)
    arguments = (
        x,
        weight,
        targets,
        bias,
        classes,
        IGNORED,
        0.1,
        0.2,
        "sum",
        5.0,
        True,
        None,
        False,
        True,
        True,
        None,
        None,
    )
    loss, z_loss, accuracy, predicted = LigerFusedLinearCrossEntropyFunction.apply(*arguments)
    assert loss is not None
    assert z_loss is not None
    assert accuracy is not None
    assert predicted is not None
    assert torch.equal(found.loss, loss)
    assert torch.equal(found.z_loss, z_loss)
    assert torch.equal(found.token_accuracy, accuracy)
    assert torch.equal(found.predicted_tokens, predicted)
    assert LigerFusedLinearCrossEntropyFunction.apply(*arguments[:4])[1:] == (None, None, None)
    assert not list(module.parameters())


def test_bfloat16_errs_no_more_than_torch() -> None:
    x, weight, _, targets, _ = problem(torch.bfloat16)
    exact = results(lambda a: formula(a, weight.double(), None, targets, {})[0], x.double(), [])

    def ours(a: Tensor) -> Any:
        return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(weight, a, targets)

    found = results(ours, x, [])
    plain = results(lambda a: formula(a, weight, None, targets, {})[0], x, [])
    assert found[0].dtype == torch.float32
    errors = [relative_error(a[1].double().numpy(), exact[1].numpy()) for a in (found, plain)]
    assert 0 < errors[0] <= FACTOR * errors[1]


def test_nothing_to_learn_from() -> None:
    x, weight, _, targets, classes = problem()
    options: dict[str, Any] = {"ce_weight": classes, "lse_square_scale": 0.1, "ignore_index": IGNORED}
    found = results(
        lambda a: liger_fused_linear_cross_entropy(a, weight, torch.full_like(targets, IGNORED), **options),  # type: ignore[arg-type]
        x,
        [],
    )
    assert not any(a.any() for a in found)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"accum_dtype": torch.float64}, "accum_dtype must be None or a float dtype up to torch.float32"),
        ({"accum_dtype": torch.int32}, "accum_dtype must be"),
        ({"chunk_mem_const": 0}, "chunk_mem_const must be >= 1"),
        ({"reduction": "max"}, "reduction must be"),
        ({"label_smoothing": 2.0}, "label_smoothing must be"),
        ({"softcap": -1.0}, "logit_softcap must be"),
    ],
)
def test_refusals(given: dict[str, Any], text: str) -> None:
    x, weight, _, targets, _ = problem(torch.float32)
    with pytest.raises(SpecError, match=text):
        liger_fused_linear_cross_entropy(x, weight, targets, ignore_index=IGNORED, **given)
    if "chunk_mem_const" not in given and "accum_dtype" not in given:
        with pytest.raises(SpecError, match=f"LigerFusedLinearCrossEntropyLoss: .*{text}"):
            LigerFusedLinearCrossEntropyLoss(**given)


def test_another_implementation_is_refused() -> None:
    x, weight, _, targets, _ = problem()
    options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, None, False, False, False, "triton")
    with pytest.raises(SpecError, match="ce_impl must be None, got 'triton'"):
        LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *options)


def test_half_of_the_tokens_may_be_right() -> None:
    """Accuracy is a mean over valid tokens also where the loss is a sum."""
    weight, targets = torch.eye(4), torch.tensor([0, 1, 2, -100])
    x = weight[[0, 1, 3, 2]]
    found = LigerFusedLinearCrossEntropyLoss(reduction="sum", return_token_accuracy=True)(weight, x, targets)
    assert found.token_accuracy == torch.tensor(2 / 3)
    assert found.predicted_tokens is None
    assert math.isfinite(found.loss)


def test_parameters_that_an_engine_is_fetching_are_refused() -> None:
    module: Any = nn.Linear(H, H)
    module.weight.ds_id, module.weight.ds_status = 0, SimpleNamespace(name="INFLIGHT")
    with pytest.raises(
        UnsupportedError, match="apply_tiled_mlp: a parameter of ZeRO-3 must be at rest, got one in flight"
    ):
        apply_tiled_mlp(lambda m, x: m(x), module, torch.ones(1, 4, H), 2)

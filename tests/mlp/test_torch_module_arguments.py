"""Activations as PyTorch users give them to modules, functions or layers: each is known by its values, or refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tiled_torch import SpecError, TiledMLP, TiledMoE
from tiled_torch.core.activation_functions import FUNCTIONS, recognised

KNOWN: dict[str, tuple[Any, str]] = {
    "F.silu": (F.silu, "silu"),
    "nn.SiLU": (nn.SiLU(), "silu"),
    "in place": (nn.SiLU(inplace=True), "silu"),
    "own silu": (lambda a: a * a.sigmoid(), "silu"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "partial": (partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    "nn.ReLU": (nn.ReLU(), "relu"),
    "squared relu": (lambda a: torch.square(F.relu(a)), "relu_squared"),
    "in a list": (nn.Sequential(nn.ReLU()), "relu"),
}


def with_hook() -> nn.Module:
    layer = nn.SiLU()
    layer.register_forward_hook(lambda module, args, y: y)
    return layer


# Near one of them, but another function, or more than a function.
OTHERS: dict[str, Callable[..., Any]] = {
    "slope of one at zero": lambda a: a.clamp(min=0),
    "relu6": nn.ReLU6(),
    "capped far out": lambda a: F.silu(a).clamp(max=5e3),
    "softmax": nn.Softmax(dim=-1),
    "glu": F.glu,
    "no slopes": lambda a: F.silu(a).detach(),
    "quick gelu": lambda a: a * torch.sigmoid(1.702 * a),
    "leaky": F.leaky_relu,
    "two arguments": torch.add,
    "another shape": torch.sum,
    "another dtype": lambda a: F.silu(a).bfloat16(),
    "no tensor": str,
}
MORE: dict[str, nn.Module] = {"a trained slope, zero now": nn.PReLU(init=0.0), "a hook": with_hook()}
TEXT = r"^TiledM.*: activation must be one of silu, .*, or a function that computes one of them, got the function "


def made(kind: str, activation: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "TiledMLP":
        return TiledMLP(8, 12, activation=activation)
    if kind == "TiledMoE":
        return TiledMoE(8, 12, 4, 2, activation=activation)
    if kind == "TiledMoE.from_weights":
        weights = (torch.randn(*shape) for shape in ((4, 8), (4, 12, 8), (4, 12, 8), (4, 8, 12)))
        return TiledMoE.from_weights(*weights, top_k=2, activation=activation)
    layers = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
    if kind == "TiledMLP.from_linears":
        return TiledMLP.from_linears(*layers, activation=activation)
    return TiledMLP.from_weights(*(layer.weight for layer in layers), activation=activation)


KINDS = ("TiledMLP", "TiledMLP.from_weights", "TiledMLP.from_linears", "TiledMoE", "TiledMoE.from_weights")


@pytest.mark.parametrize("name", KNOWN)
def test_an_activation_is_known_by_its_values(name: str) -> None:
    fn, expected = KNOWN[name]
    assert recognised(fn) == expected
    x = torch.randn(2, 5, 8)
    for kind in KINDS:
        module, twin = made(kind, fn), made(kind, expected)
        assert module.activation == expected
        assert torch.equal(module(x), twin(x))
        assert f"activation={expected}" in repr(module)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_an_activation_is_refused(name: str) -> None:
    assert recognised(OTHERS[name]) is None
    for kind in KINDS:
        with pytest.raises(SpecError, match=f"{TEXT}.*Its values or slopes are those of none: `tile` takes"):
            made(kind, OTHERS[name])


@pytest.mark.parametrize("name", MORE)
def test_a_layer_with_state_or_hooks_is_no_function(name: str) -> None:
    for kind in KINDS:
        with pytest.raises(SpecError, match=f"{TEXT}.*It has state or hooks of its own: `tile` takes a module"):
            made(kind, MORE[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_activation_is_told_from_the_others(name: str) -> None:
    assert recognised(FUNCTIONS[name]) == name


def test_a_function_is_tried_wherever_a_module_is_made() -> None:
    class Silu:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, a: Tensor) -> Tensor:
            return F.silu(a)

    assert recognised(Silu()) == "silu"
    with torch.device("meta"):
        assert made("TiledMLP", lambda a: F.silu(a)).activation == "silu"
    with FakeTensorMode():
        assert made("TiledMLP", lambda a: F.silu(a)).activation == "silu"
    with torch.inference_mode():
        assert made("TiledMLP", lambda a: F.silu(a)).activation == "silu"
    with torch.autocast("cpu"):
        assert made("TiledMLP", lambda a: F.silu(a)).activation == "silu"

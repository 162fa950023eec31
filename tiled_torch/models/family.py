"""What `tile_model` has to know of a Hugging Face MLP class: where its projections are and that its math is the known one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shared_specs.config import Activation


@dataclass(frozen=True)
class Operands:
    """The arguments of `tiled_mlp` as one module holds them; weights are [out, in]."""

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    biases: dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """MLP classes that compute down(act(gate(x)) * up(x)) from the same attributes.

    Args:
        name: of the family. classes: class names in transformers whose forward is exactly that formula.
        projections: attributes that hold the nn.Linear modules. activation: attribute that holds the activation.
        operands: reads the weights of a module; views where gate and up are one weight.
    """

    name: str
    classes: frozenset[str]
    projections: tuple[str, ...]
    activation: str
    operands: Callable[[Any], Operands]


# Class of the activation module -> the activation of the specification that computes the same values.
ACTIVATION_CLASSES: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
}


def activation_of(module: nn.Module) -> Activation | None:
    """The specification's name of an activation module; None where it has none."""
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return ACTIVATION_CLASSES.get(type(module).__name__)


def present_biases(**biases: Tensor | None) -> dict[str, Tensor]:
    return {name: bias for name, bias in biases.items() if bias is not None}


def reason_linear_is_not_plain(name: str, linear: Any) -> str | None:
    """Why a projection is more than its weight and bias; None where it is a plain nn.Linear."""
    if type(linear) is not nn.Linear:
        return f"{name} is {type(linear).__name__}"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(linear, kind) for kind in hooks):
        return f"{name} has hooks"
    if type(linear.weight) not in (nn.Parameter, Tensor):
        return f"the weight of {name} is {type(linear.weight).__name__}"
    return None

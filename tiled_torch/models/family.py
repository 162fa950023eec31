"""What `tile_model` has to know of a Hugging Face MLP class: where its projections are and that its math is the known one."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shared_specs.config import Activation
from tiled_torch.core.partitioned import is_hook, weight_of
from tiled_torch.models.pickling import Remade


@dataclass(frozen=True)
class MLPWeights:
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
    operands: Callable[[Any], MLPWeights]


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
    """Return the specification's name of an activation module; None where it has none."""
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return ACTIVATION_CLASSES.get(type(module).__name__)


def present_biases(**biases: Tensor | None) -> dict[str, Tensor]:
    return {name: bias for name, bias in biases.items() if bias is not None}


def reason_linear_is_not_plain(name: str, linear: Any, *, gathered: bool = False) -> str | None:
    """Return why a projection is more than its weight and bias; None where it is a plain nn.Linear.

    gathered: ZeRO-3's hooks do not count, since somebody else gathers its parameters.
    """
    if type(linear) is not nn.Linear:
        kind = type(linear)
        return f"{name} is {f'{kind.__module__}.' if kind.__name__ == 'Linear' else ''}{kind.__name__}"  # peft's, say
    reason = reason_called(name, linear, gathered=gathered)
    if reason is not None:
        return reason
    kind = type(weight_of(linear))
    if kind not in (nn.Parameter, Tensor, FakeTensor):  # a simulation runs what it stands for
        return f"the weight of {name} is {kind.__name__}"
    return None


def reason_called(name: str, module: nn.Module, *, gathered: bool = False) -> str | None:
    """Return why a module has to be called; None where its formula is all that it does. gathered: but for ZeRO-3's hooks."""
    if "forward" in vars(module):
        return f"{name} has a forward of its own"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = (hook for kind in hooks for hook in getattr(module, kind).values())
    return f"{name} has hooks" if any(not (gathered and is_hook(hook)) for hook in found) else None


def forward_in_place_of(module: nn.Module, known: Collection[str]) -> str | None:
    """Return the forward that a module runs instead of the one of a class whose name is known; None where it runs that one."""
    own = vars(module).get("forward")
    if own is not None:
        return getattr(own, "__name__", type(own).__name__)
    home = next(base for base in type(module).__mro__ if "forward" in vars(base) and not issubclass(base, Remade))
    function = inspect.unwrap(vars(home)["forward"])
    if home.__name__ not in known or function.__module__ != home.__module__:
        return f"{function.__module__}.{function.__qualname__}"
    return None

"""What `tile_model` has to know of a Hugging Face MLP class: where its projections are and that its math is the known one."""

import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shared_specs.config import Activation
from tiled_torch.core.partitioned import is_hook, weight_of
from tiled_torch.models.pickling import Remade

_CAPTURING = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class MLPWeights:
    """The arguments of `tiled_mlp` as one module holds them; weights are [out, in]. w_gate None: two matrices."""

    w_gate: Tensor | None
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
    kind = type(module)
    if not is_of("torch", kind) and not is_of("transformers", kind):  # whose name says nothing
        return None
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return ACTIVATION_CLASSES.get(kind.__name__)


def is_of(package: str, kind: type[Any]) -> bool:
    """Return whether a package defines a class: one of somebody else may have the same name, and compute something else."""
    return kind.__module__.partition(".")[0] == package


def home_of(module: nn.Module) -> type[Any]:
    """Return the class that a module's forward is of: not the one that a subclass with another forward comes from."""
    return next(base for base in type(module).__mro__ if "forward" in vars(base) and not issubclass(base, Remade))


def present_biases(**biases: Tensor | None) -> dict[str, Tensor]:
    return {name: bias for name, bias in biases.items() if bias is not None}


def reason_linear_is_not_plain(name: str, linear: Any, *, gathered: bool = False, unit: bool = False) -> str | None:
    """Return why a projection is more than its weight and bias; None where it is a plain nn.Linear.

    gathered: ZeRO-3's hooks do not count, since somebody else gathers its parameters. unit: nor does it that the layer is a
    unit of FSDP2, since it is called once, around all shards.
    """
    kind = type(linear)
    if unit and is_unit(linear):
        return reason_called(name, linear, gathered=gathered, unit=True)
    if kind is not nn.Linear:
        return f"{name} is {f'{kind.__module__}.' if kind.__name__ == 'Linear' else ''}{kind.__name__}"  # peft's, say
    reason = reason_called(name, linear, gathered=gathered)
    if reason is not None:
        return reason
    kind = type(weight_of(linear))
    if kind not in (nn.Parameter, Tensor, FakeTensor):  # a simulation runs what it stands for
        return f"the weight of {name} is {kind.__name__}"
    return None


def is_unit(module: Any) -> bool:
    """Return whether a module is what `fully_shard` makes of nn.Linear."""
    bases = getattr(type(module), "_kind", type(module)).__bases__  # _kind: of a head that is swapped
    return bases[1:] == (nn.Linear,) and bases[0].__name__ == "FSDPModule"


def dtype_of_unit(unit: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a unit of FSDP2 hands on its results. dtype: of what its layer computes in its parameters'."""
    policy = unit._get_fsdp_state()._mp_policy
    return policy.output_dtype or policy.param_dtype or dtype


def parts_of_unit(unit: Any) -> list[Tensor]:
    """Return this rank's parts of the parameters of a unit of FSDP2, gathered now or not: what an optimizer changes."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # of a torch before several groups
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def reason_called(
    name: str, module: nn.Module, *, gathered: bool = False, unit: bool = False, known: Collection[int] = ()
) -> str | None:
    """Return why a module has to be called; None where its formula is all that it does.

    Hooks by which transformers collects outputs are no reason in a call that does not ask for them: they stay for good.
    gathered: but for ZeRO-3's hooks. unit: but for FSDP2's. known: numbers of hooks that somebody else sees to.
    """
    if "forward" in vars(module):
        return f"{name} has a forward of its own"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = (hook for kind in hooks for number, hook in getattr(module, kind).items() if number not in known)
    engines = (gathered and is_hook, unit and _is_hook_of_units, _collects_nothing)
    others = (hook for hook in found if not any(engine and engine(hook) for engine in engines))
    return f"{name} has hooks" if any(True for _ in others) else None


def _collects_nothing(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of transformers' that collect outputs, and this call asks for none of its kind."""
    if torch.compiler.is_compiling() or getattr(hook, "__module__", "") != _CAPTURING:
        return False
    active = _collector()
    if active is None:
        return False
    wanted, cells = active.get(), dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return wanted is None or ("key" in cells and cells["key"].cell_contents not in wanted)


def _collector() -> Any:
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def _is_hook_of_units(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")


def forward_in_place_of(module: nn.Module, known: Collection[str]) -> str | None:
    """Return the forward that a module runs instead of the one of a class of transformers whose name is known; None where it
    runs that one."""
    own = vars(module).get("forward")
    if own is not None:
        return getattr(own, "__name__", type(own).__name__)
    home = home_of(module)
    function = inspect.unwrap(vars(home)["forward"])
    if home.__name__ in known and function.__module__ == home.__module__ and is_of("transformers", home):
        return None
    return f"{function.__module__}.{function.__qualname__}"

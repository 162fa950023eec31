"""Which modules are experts that `tile_model` knows, which their routers are, and what of them is more than the formula.

transformers declares a class of experts to its interface (`use_experts_implementation`), where every implementation computes
one formula from the same attributes. So what is declared is known by its attributes, whatever its name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from transformers.integrations.moe import use_experts_implementation

from tiled_torch.core.operands import PLAIN_TENSORS
from tiled_torch.models.experts import dbrx, llama4, longcat
from tiled_torch.models.family import home_of, is_of, reason_called
from tiled_torch.moe.steps import ExpertWeights

# Implementations that compute the formula by plain products. Others are kernels of somebody's, which are called.
PRODUCTS = ("eager", "grouped_mm", "batched_mm", None)
# Not declared, but the same formula from the same attributes.
LIKE_DECLARED = frozenset({"Step3p7Experts"})


@dataclass(frozen=True)
class ExpertsForm:
    """Where experts keep their weights.

    gated: `_apply_gate` stands between the products, else `act_fn`. normed: a norm follows them. dense: as in `llama4.py`.
    flat: as in `dbrx.py`. passing: as in `longcat.py`.
    """

    up: str
    biases: tuple[str, str] | None
    transposed: bool
    gated: bool
    normed: bool = False
    dense: bool = False
    flat: bool = False
    passing: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return dbrx.NAMES if self.flat else (self.up, "down_proj", *(self.biases or ()))


@use_experts_implementation
class _Declared(nn.Module):
    def forward(self) -> None: ...


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of experts that is tiled, also after tiling or sharding changed its class."""
    return experts_form_of(module) is not None


def experts_form_of(module: Any) -> ExpertsForm | None:
    """Return the form of a module of experts; None of any other module, and of experts that have to be called."""
    home = home_of(module)
    theirs = is_of("transformers", home)
    if theirs and home.__name__ in dbrx.FLAT:
        return ExpertsForm("v1", None, transposed=False, gated=True, flat=True)
    if isinstance(getattr(module, "down_proj", None), nn.Module | None):
        return None
    if theirs and home.__name__ in longcat.PASSING:
        return ExpertsForm("gate_up_proj", None, transposed=False, gated=True, passing=True)
    if not hasattr(module, "num_experts"):
        return None
    if theirs and home.__name__ in llama4.DENSE:
        return ExpertsForm("gate_up_proj", None, transposed=True, gated=True, dense=True)
    declared = getattr(vars(home)["forward"], "__code__", None) is vars(_Declared)["forward"].__code__
    if not declared and not (theirs and home.__name__ in LIKE_DECLARED):
        return None
    gated = getattr(module, "has_gate", True)
    up = "gate_up_proj" if gated else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if getattr(module, "has_bias", False) else None
    normed = getattr(module, "has_post_expert_norm", False)
    return ExpertsForm(up, biases, getattr(module, "is_transposed", False), gated, normed)


def operands_of(module: Any, form: ExpertsForm) -> ExpertWeights:
    """Return the weights of experts, read once: under a parametrization (LoRA) each look computes them."""
    return dbrx.flat_operands(module) if form.flat else ExpertWeights(*(getattr(module, name) for name in form.names))


def reason_not_formula(module: Any, form: ExpertsForm) -> str | None:
    """Return why experts are more than their formula, so that they have to be called; None where they are not."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in PRODUCTS:
        return f"experts_implementation is {implementation}"
    if form.normed:
        return "a norm follows every expert"
    if form.dense and (reason := llama4.reason_not_zero(module)) is not None:
        return reason
    if form.flat:
        return dbrx.reason_not_flat(module)
    expected = {*form.names, "parametrizations"}
    more = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    known = ("act_fn", *longcat.IDENTITY * form.passing)
    more += [
        name for name, child in module.named_children() if name not in known or any(True for _ in child.parameters())
    ]
    found = next((name for name in more if name not in expected), None)
    if found is not None:
        return f"it has {found}"
    act_fn = getattr(module, "act_fn", None)
    return reason_called("act_fn", act_fn) if isinstance(act_fn, nn.Module) else None


def reason_operands_are_not_plain(form: ExpertsForm, operands: ExpertWeights) -> str | None:
    """Return why products cannot take a weight: a DTensor, say, or a quantised one."""
    for name, operand in zip(form.names, dbrx.matrices(operands) if form.flat else operands, strict=False):
        if operand is None or not isinstance(operand, Tensor):
            return f"{name} is {type(operand).__name__}"
        if type(operand) not in (*PLAIN_TENSORS, FakeTensor) or not operand.is_floating_point():
            return f"{name} is {type(operand).__name__} of {operand.dtype}"
    return None


def reason_weights_are_lent(module: nn.Module) -> str | None:
    """Return why a module's weights, or those of its parts, may be others in backward; None where they are its own.

    LoRA of a parameter, peft's, parametrizes it for one call, in the context `parametrize.cached`.
    """
    lent = parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules()))
    return "its weights are parametrized for this call" if lent else None


def routers_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the router beside every module of experts: in a child `gate` or `router` of the nearest module that has one."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not is_experts(module):
            continue
        while name:
            name = name.rpartition(".")[0]
            children = (_unwrapped(n, getattr(modules[name], n, None)) for n in ("gate", "router"))
            found = next((each for each in children if is_router(each[1])), None)
            if found is not None:
                yield f"{name}.{found[0]}".removeprefix("."), found[1]
                break


def _unwrapped(name: str, module: Any) -> tuple[str, Any]:
    """Return a module and its name without what adapters, such as those of peft, have put around it."""
    while not is_router(module) and isinstance(inside := getattr(module, "base_layer", None), nn.Module):
        name, module = f"{name}.base_layer", inside
    return name, module


def is_router(module: Any) -> bool:
    """Return whether a module chooses experts itself. A linear layer, whose logits others choose by, is none."""
    names = [base.__name__ for base in type(module).__mro__]
    return isinstance(module, nn.Module) and any(n.endswith(("Router", "Gate", "Gating")) for n in names)

"""An MLP that was found by its structure: what `tile_model` knows of it, and whether that still holds in a call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared_specs.config import Activation
from tiled_torch.core.gradients import fused_halves
from tiled_torch.models.family import MLPWeights, present_biases, reason_called, reason_linear_is_not_plain
from tiled_torch.models.mlps.layout import MLPLayout, Roles, layout_of
from tiled_torch.models.mlps.probe import formula_of, reason_not_token_wise

OTHER = "a probe shows another formula than that of tiled_mlp"


@dataclass(frozen=True)
class Found:
    """Describes what a probe of a module's code showed.

    Args:
        projections: attributes that hold its linear layers. roles, activation: as in `tiled_mlp`; None: it is token-wise, and
            another formula. kept: everything that the module's own code looks at besides, as it was.
    """

    projections: tuple[str, ...]
    others: tuple[str, ...]
    roles: Roles | None
    activation: Activation | None
    kept: tuple[tuple[str, Any], ...]

    def operands(self, module: Any) -> MLPWeights:
        """Return the arguments of `tiled_mlp` as the module holds them."""
        roles = self.roles
        assert roles is not None
        w_down, b_down = weight_and_bias(getattr(module, roles.down))
        w_up, b_up = weight_and_bias(getattr(module, roles.up))
        w_gate, b_gate = (None, None) if roles.gate is None else weight_and_bias(getattr(module, roles.gate))
        if roles.fused is not None:
            weights, biases = fused_halves(w_up), (None, None) if b_up is None else fused_halves(b_up)
            gate, up = roles.fused
            w_gate, w_up, b_gate, b_up = weights[gate], weights[up], biases[gate], biases[up]
        return MLPWeights(w_gate, w_up, w_down, present_biases(gate=b_gate, up=b_up, down=b_down))

    def reason(self, module: nn.Module) -> str | None:
        """Return why the module has to be called; None where the formula is all that it does now."""
        if self.roles is None:
            return OTHER
        reasons = (reason_not_plain_operand(name, getattr(module, name)) for name in self.projections)
        reasons_of_others = (self._reason_of_other(module, name) for name in self.others)
        found = next((reason for reason in (*reasons, *reasons_of_others) if reason is not None), None)
        if found is None and not torch.compiler.is_compiling() and kept_of(module, self.others) != self.kept:
            return "its attributes are not those that were probed"
        return found

    def _reason_of_other(self, module: nn.Module, name: str) -> str | None:
        child = getattr(module, name)
        if isinstance(child, nn.modules.dropout._DropoutNd) and module.training and child.p:
            return f"{name} drops values"
        return reason_called(name, child, gathered=True)


def find(module: nn.Module) -> Found | str | None:
    """Return what is known of an MLP; a reason, where its layers are those of one and that is not enough; None of another."""
    layout = layout_of(module)
    if layout is None:
        return None
    try:
        known = formula_of(module, layout)
    except Exception:  # of code that is not ours: the probe for tokens tells which
        known = None
    if known is None:
        reason = reason_not_token_wise(module)
        if reason is not None:
            return reason
        return _found(module, layout, None, None)
    return _found(module, layout, *known)


def _found(module: nn.Module, layout: MLPLayout, roles: Roles | None, activation: Activation | None) -> Found:
    return Found(tuple(layout.linears), layout.others, roles, activation, kept_of(module, layout.others))


def kept_of(module: nn.Module, others: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Return the numbers and functions among a module's attributes, and of its children without weights these and classes."""
    kept = _values_of(module)
    for name in others:
        for inner, child in getattr(module, name).named_modules(prefix=name):
            kept.append((inner, type(child)))
            if not isinstance(child, nn.modules.dropout._DropoutNd):  # what it drops is seen in each call
                kept += [(f"{inner}.{key}", value) for key, value in _values_of(child)]
    return tuple(kept)


def _values_of(module: nn.Module) -> list[tuple[str, Any]]:
    plain = (int, float, str, type(None))
    values = vars(module).items()
    seen = ((name, value) for name, value in values if name not in _OWN and not name.startswith(_OF_OTHERS))
    return [(name, value) for name, value in seen if isinstance(value, plain) or _is_function(value)]


# Of nn.Module and of tiling, and of transformers, FSDP2 and DeepSpeed; they say nothing of the formula.
_OWN = frozenset(vars(nn.Module())) | {
    "_backend",
    "_ran",
    "_leaf",
    "_model_name",
    "_alone",
    "_run_split",
    "_left",
    "_heard",
    "_made",
}
_OF_OTHERS = ("_is_hf", "_is_fsdp", "_fsdp", "ds_")


def _is_function(value: Any) -> bool:
    return isinstance(value, Callable) and not isinstance(value, nn.Module | type)  # type: ignore[arg-type]


def reason_not_plain_operand(name: str, linear: Any) -> str | None:
    """Return why a projection is more than its weight and bias; None where it is nn.Linear or transformers' Conv1D."""
    if type(linear) is Conv1D:
        return reason_called(name, linear, gathered=True)
    return reason_linear_is_not_plain(name, linear, gathered=True)


def weight_and_bias(linear: Any) -> tuple[Any, Any]:
    """Return the weight as [out, in], and the bias."""
    return (linear.weight.t() if isinstance(linear, Conv1D) else linear.weight), linear.bias

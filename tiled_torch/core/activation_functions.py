"""Activations as functions or modules: which one of the specification they are, told by values and slopes, never by name."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shared_specs.core.activations import POINTS, fail_unknown_function
from shared_specs.tolerances import FORMULA_FLOAT32

ActivationFunction = Callable[[Tensor], Tensor]  # nn.Module too
FUNCTIONS: dict[str, ActivationFunction] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda a: F.relu(a).square(),
}


def activation_name(function: str, activation: Any) -> Any:
    """Return the name of the activation that a function computes; what cannot be called is returned as it is.

    Raises:
        SpecError: the function computes none of them, or is a module that has state or hooks of its own.
    """
    if not callable(activation):
        return activation
    if (found := recognised(activation)) is None:
        fail_unknown_function(function, activation, state=_is_more_than_a_function(activation))
    return found


def recognised(fn: Callable[..., Any]) -> str | None:
    """Return the activation whose values and slopes fn has at every point of a grid, zero and far ones included; or None."""
    if _is_more_than_a_function(fn):
        return None
    try:
        return _recognised(fn)
    except TypeError:  # no hash
        return _recognised.__wrapped__(fn)


def _is_more_than_a_function(fn: Any) -> bool:
    """Return whether fn is a module with parameters, buffers or hooks, which its values alone do not show."""
    if not isinstance(fn, nn.Module):
        return False
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = any(getattr(inner, kind) for inner in fn.modules() for kind in kinds)
    return hooks or any(True for _ in fn.parameters()) or any(True for _ in fn.buffers())


@lru_cache(maxsize=64)
def _recognised(fn: Callable[..., Any]) -> str | None:
    with unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad():
        try:
            found = _values_and_slopes(fn)
        except Exception:  # whatever a function of something else than one tensor raises
            return None
        return next((name for name, known in FUNCTIONS.items() if _equal(found, _values_and_slopes(known))), None)


def _values_and_slopes(fn: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    a = torch.tensor(POINTS, dtype=torch.float32, device="cpu", requires_grad=True)
    values = fn(a.clone())  # which an activation in place overwrites
    if values.shape != a.shape or values.dtype != a.dtype:
        raise TypeError("no activation")
    return values.detach(), torch.autograd.grad(values, a, torch.ones_like(values))[0]


def _equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(bool(((a - b).abs() <= FORMULA_FLOAT32 * b.abs().clamp(min=1)).all()) for a, b in pairs)

"""What is asked of tensors and devices in many places, and the refusal that every hand-written backward makes."""

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shared_specs.core.checks import flat_tokens
from shared_specs.errors import UnsupportedError, error_text


def rows_of(a: Tensor) -> Tensor:
    """Return [T, last dim]; a copy only where the leading dims cannot be merged."""
    return a.reshape(flat_tokens(a.shape), a.shape[-1])


def device_kind(device: torch.device) -> str:
    """ "cpu" or "gpu", as plans and costs name devices."""
    return "cpu" if device.type == "cpu" else "gpu"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that both halves and numpy have for a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def refuse_second_order(function: str, advice: str = ".", backward: str = "The hand-written backward") -> None:
    """Raise UnsupportedError in a backward that is to be differentiated itself; a compiler traces one with gradients enabled.

    advice: what follows "derivative".
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{function}: create_graph must be False in backward, got True. {backward} has no second derivative{advice}"
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and elementwise work: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Return whether a value is a DTensor; does not load torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def refuse_dtensor(function: str, what: str, value: Any, advice: str) -> None:
    """Refuse a DTensor where a plain tensor is needed; `what` names it in the message.

    Raises:
        UnsupportedError: `value` is a DTensor.
    """
    if is_dtensor(value):
        raise UnsupportedError(error_text(function, what, "a plain tensor", "a DTensor", advice=advice))

"""Autocast as nn.Linear sees it, asked once per call."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shared_specs.core import checks
from tiled_torch.core.tensors import dtype_name

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
# Asked once: torch.compile of PyTorch 2.11 cannot trace the question.
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", torch._C._get_privateuse1_backend_name())
_WITH_AUTOCAST = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype autocast would cast x and its weights to on x's device; None where it does not apply."""
    device = x.device.type
    if x.dtype not in _CASTABLE or device not in _WITH_AUTOCAST:
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def after_autocast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of an operand once autocast to `dtype` (None: off) has been applied; float64 and integers stay."""
    return dtype if dtype is not None and tensor.dtype in _CASTABLE else tensor.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products inside run in the dtypes they are given."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if device in _WITH_AUTOCAST else nullcontext()


def operand(tensor: Tensor, cast: torch.dtype | None) -> checks.Operand:
    """Return the tensor as the checks see it, after the cast that autocast would make."""
    name = dtype_name(after_autocast(tensor, cast))
    return checks.Operand(tuple(tensor.shape), name, str(tensor.device))

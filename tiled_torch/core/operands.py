"""What an operand must be besides its shape: a tensor whose values are here, and of no class with products of its own; and
what modules check of tensors and dtypes that become their parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail_type
from tiled_torch.core.autocast import operand
from tiled_torch.core.tensors import dtype_name, refuse_dtensor

_GATHER = "Call the module that owns it, whose engine gathers it, or call inside deepspeed.zero.GatheredParameters."
_OTHERS = "Convert it to a plain tensor, or use tile(), which calls the layers as they are."

# Classes of tensors that hold their values, or would hold them outside a simulation.
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)


def check_tensor(function: str, name: str, value: Any, of_dtensor: str) -> None:
    """Raise TypeError for what is no tensor, UnsupportedError for one that the products and buffers of a shard cannot take.

    of_dtensor: what to do with a DTensor instead.
    """
    if not isinstance(value, Tensor):
        fail_type(function, name, "an array", type(value).__name__)
    if type(value) not in PLAIN_TENSORS:
        _check_class(function, name, value, of_dtensor)
    if hasattr(value, "ds_id") and not value.numel():
        got = "a ZeRO-3 parameter that is partitioned"
        raise UnsupportedError(error_text(function, name, "gathered", got, advice=_GATHER))


def _check_class(function: str, name: str, value: Tensor, of_dtensor: str) -> None:
    refuse_dtensor(function, name, value, of_dtensor)
    kind = type(value).__name__
    # An AsyncCollectiveTensor becomes a plain tensor at its first use.
    if is_traceable_wrapper_subclass(value) and kind != "AsyncCollectiveTensor":
        raise UnsupportedError(error_text(function, name, "a plain tensor", f"a {kind}", advice=_OTHERS))


def has_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read: not those of FakeTensorMode or of the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def as_operand(function: str, name: str, value: Any) -> checks.Operand:
    """Return a tensor that becomes a parameter as the checks see it; TypeError for anything else."""
    if not isinstance(value, Tensor):
        fail_type(function, name, "an array", type(value).__name__)
    return operand(value, None)


def check_param_dtype(function: str, dtype: Any) -> None:
    """Raise SpecError for a dtype that no parameter can have; None is PyTorch's default one."""
    if dtype is not None:
        name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        checks.check_param_dtype(function, "dtype", name)

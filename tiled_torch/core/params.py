"""What the modules check of tensors and dtypes that become their parameters."""

from typing import Any

import torch
from torch import Tensor

from shared_specs.core import checks
from shared_specs.errors import fail_type
from tiled_torch.core.autocast import operand
from tiled_torch.core.tensors import dtype_name


def as_operand(function: str, name: str, value: Any) -> checks.Operand:
    """Return a tensor as the checks see it; TypeError for anything else."""
    if not isinstance(value, Tensor):
        fail_type(function, name, "an array", type(value).__name__)
    return operand(value, None)


def check_dtype(function: str, dtype: Any) -> None:
    """Raise SpecError for a dtype that no parameter can have; None is PyTorch's default one."""
    if dtype is not None:
        name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        checks.check_param_dtype(function, "dtype", name)

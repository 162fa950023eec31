"""A small float64 twin of a module: the same class, attributes and code with few columns, so that a probe costs nothing and
reads no weight, wherever those are.
"""

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tiled_torch.models.mlps.layout import sizes_of
from tiled_torch.models.pickling import Remade

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict) and "hook" in name)


_LARGEST = 512  # columns, up to which all sizes keep their ratios


def small_sizes(module: nn.Module) -> dict[int, int]:
    """Return a small size for each size of the linear layers in a module, and for its half."""
    found = {size for inner in module.modules() for size in sizes_of(inner) or ()}
    common = math.gcd(*found)
    if max(found) // common <= _LARGEST:
        small = {size: 2 * size // common for size in found}
    else:
        small = {size: 8 + 4 * place for place, size in enumerate(sorted(found))}
    return {size // 2: few // 2 for size, few in small.items() if size % 2 == 0} | small


def small_twin(module: nn.Module, small: dict[int, int], generator: torch.Generator) -> Any:
    """Return the twin, in eval mode and without hooks: every size in `small` is replaced, in tensors and in attributes."""
    if type(module) is nn.Linear or isinstance(module, Conv1D) or sizes_of(module) is not None:
        inputs, outputs = sizes_of(module) or (0, 0)
        has_bias = getattr(module, "bias", None) is not None
        size = small.get(inputs, inputs), small.get(outputs, outputs)
        return _linear(*size, has_bias=has_bias, conv=isinstance(module, Conv1D), generator=generator)
    kind: Any = type(module)._untiled if isinstance(module, Remade) else type(module)
    twin = kind.__new__(kind)
    vars(twin).update({name: _small_value(value, small) for name, value in vars(module).items()})
    vars(twin).update({name: OrderedDict() for name in _HOOKS}, training=False)
    for table in ("_parameters", "_buffers"):
        found = getattr(module, table).items()
        vars(twin)[table] = {name: _small_tensor(tensor, small, generator) for name, tensor in found}
    children = module._modules.items()
    vars(twin)["_modules"] = {name: child and small_twin(child, small, generator) for name, child in children}
    return twin


def _linear(inputs: int, outputs: int, *, has_bias: bool, conv: bool, generator: torch.Generator) -> nn.Module:
    shape = (inputs, outputs) if conv else (outputs, inputs)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64, device="cpu") if has_bias or conv else None
    linear: Any = Conv1D.__new__(Conv1D) if conv else nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    names = ("nx", "nf") if conv else ("in_features", "out_features")
    vars(linear).update(zip(names, (inputs, outputs), strict=True))
    return linear


def _small_value(value: Any, small: dict[int, int]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | tuple):
        return value if not isinstance(value, nn.Module) else copy.copy(value)
    return small.get(value, value) if isinstance(value, int) else tuple(_small_value(item, small) for item in value)


def _small_tensor(tensor: Tensor | None, small: dict[int, int], generator: torch.Generator) -> Tensor | None:
    if tensor is None:
        return None
    if not tensor.dim():
        value = tensor if tensor.device.type != "meta" else torch.ones(())
        return value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()
    shape = tuple(small.get(size, size) for size in getattr(tensor, "ds_shape", tensor.shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

"""Tensor parallelism of a finished model: the styles of its plan, applied by torch's `parallelize_module`."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from shared_specs.config import TensorParallel
from tiled_torch.plans.registry import Plan
from tiled_torch.plans.tensor_styles import whole_gradients


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, tensor: TensorParallel, plan: Plan) -> None:
    """Split the model over `mesh`, one axis, as its plan says."""
    assert plan.styles is not None
    for path, style in plan.styles(model, tensor).items():
        parallelize_module(model, mesh, {path: style} if path else style)
    plan.finish(model, mesh, tensor)
    whole_gradients(model)
    if tensor.asynchronous:
        _overlap(mesh)


def reason_not_asynchronous() -> str | None:
    """Return why products cannot be overlapped with their communication here; None where they can."""
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU."


def _overlap(mesh: DeviceMesh) -> None:
    """Let the compiler turn all-gather + product and product + reduce-scatter into pipelines over symmetric memory."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    settings: Any = inductor
    settings._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)

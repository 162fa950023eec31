"""Tensor parallelism of a finished model: the styles of its plan, applied by torch's `parallelize_module`."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from shared_specs.config import TensorParallel
from tiled_torch.models.block.shards import BlockRanks
from tiled_torch.plans.recompute import is_tiled_block
from tiled_torch.plans.registry import Plan
from tiled_torch.plans.tensor_styles import whole_gradients


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, tensor: TensorParallel, plan: Plan) -> None:
    """Split the model over `mesh`, one axis, as its plan says."""
    assert plan.styles is not None
    blocks: list[Any] = [block for block in plan.blocks_of(model) if is_tiled_block(block)]
    before = set().union(*map(_hooks_of, blocks))
    for path, style in plan.styles(model, tensor).items():
        parallelize_module(model, mesh, {path: style} if path else style)
    plan.finish(model, mesh, tensor)
    whole_gradients(model)
    for block in blocks:
        block._block_ranks = BlockRanks(mesh, tensor.sequence_parallel, frozenset(_hooks_of(block) - before))
    if tensor.asynchronous:
        _overlap(mesh)


def _hooks_of(block: nn.Module) -> set[int]:
    """Return the numbers of the hooks of all modules inside: the styles', when they have been applied."""
    found = (inner for inner in block.modules() if inner is not block)
    return {number for inner in found for number in (*inner._forward_pre_hooks, *inner._forward_hooks)}


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

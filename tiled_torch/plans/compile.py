"""torch.compile of a finished model, block by block, so that equal blocks are compiled once."""

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch._dynamo
from torch import nn

from shared_specs.config import SELECTIVE_MODES, Compile, ParallelConfig
from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.plans.recompute import Checkpointed, is_tiled_block
from tiled_torch.plans.registry import Plan


def apply_compile(model: nn.Module, options: Compile, plan: Plan, *, split: bool = False) -> None:
    """Compile every block in place, and the embedding, the norm and the head apart where asked.

    Args:
        split: whether tensor parallelism was applied. A block that is recomputed is then compiled inside its checkpoint:
            PyTorch 2.13 cannot trace a checkpoint whose region redistributes DTensors. So is one whose MLP goes through
            `tile`, which breaks the graph, and one whose input is offloaded.
    """
    for block in plan.blocks_of(model):
        if is_tiled_block(block):
            continue  # one function, which a compiler does not look into
        if isinstance(block, Checkpointed) and (split or block._offload or breaks_graph(block)):
            block._compiled_inside = torch.compile(super(Checkpointed, block).forward)  # type: ignore[misc]
        else:
            block.compile()
    if options.ends:
        for path in plan.ends:
            _compile_end(model.get_submodule(path))
    if options.compiled_autograd:
        # Reductions are then operations of the compiled backward instead of calls from C++ that it cannot see.
        torch._dynamo.config.optimize_ddp = "python_reducer"


def breaks_graph(block: nn.Module) -> bool:
    """Return whether an MLP of a block will go through `tile`, between two compiled graphs."""
    if not any(hasattr(module, "_tiling") for module in block.modules()):
        return False
    from tiled_torch.models.mlps.tiled import Tiled, path_now

    return any(isinstance(module, Tiled) and path_now(module).startswith("tile:") for module in block.modules())


def _compile_end(module: Any) -> None:
    """Compile the forward alone. module.compile() would leave modules of torch.nn as they are: the compiler looks at no frame
    of PyTorch's own, and once the hooks of a sharding engine break the graph there is no other."""
    plain = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)

    module.forward = MethodType(torch.compile(forward), module)  # bound, so that a copy of the module calls its own


def check_compile(function: str, config: ParallelConfig, model: nn.Module) -> None:
    """Check that PyTorch can compile the model as `config` asks, where layers are split or go through `tile`.

    Raises:
        UnsupportedError: it cannot.
    """
    mode = None if config.checkpointing is None else config.checkpointing.mode
    if config.compile is None or mode not in SELECTIVE_MODES:
        return
    kept = "and operations inside compiled code cannot be kept."
    if config.tensor is not None:
        rule = '"full" or "layers" with config.tensor and config.compile'
        advice = f"PyTorch cannot trace a checkpoint around DTensors, {kept}"
        raise UnsupportedError(error_text(function, "config.checkpointing.mode", rule, repr(mode), advice=advice))
    if breaks_graph(model):
        rule = '"full" or "layers" with config.compile where an MLP goes through tile'
        advice = f"PyTorch cannot trace a checkpoint around it, {kept} tiling_paths(model) says why it does."
        raise UnsupportedError(error_text(function, "config.checkpointing.mode", rule, repr(mode), advice=advice))


def backward_context(config: ParallelConfig) -> AbstractContextManager[object]:
    """Return the context for `loss.backward()`: with `compiled_autograd` it compiles backward as one graph, otherwise it does
    nothing.

    Example:
        >>> with backward_context(ParallelConfig()):
        ...     torch.ones((), requires_grad=True).backward()
    """
    if config.compile is None or not config.compile.compiled_autograd:
        return nullcontext()
    return torch._dynamo.utils.maybe_enable_compiled_autograd(True)

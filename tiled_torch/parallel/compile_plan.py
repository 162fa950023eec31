"""torch.compile of a finished model, block by block, so that equal blocks are compiled once."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch._dynamo
from torch import nn

from shared_specs.config import Compile, ParallelConfig
from tiled_torch.parallel.plan_registry import Plan


def apply_compile(model: nn.Module, options: Compile, plan: Plan) -> None:
    """Compile every block in place, and the embedding, the norm and the head apart where asked."""
    for block in plan.blocks_of(model):
        block.compile()
    if options.ends:
        for path in plan.ends:
            model.get_submodule(path).compile()
    if options.compiled_autograd:
        # Reductions are then operations of the compiled backward instead of calls from C++ that it cannot see.
        torch._dynamo.config.optimize_ddp = "python_reducer"


def backward_context(config: ParallelConfig) -> AbstractContextManager[object]:
    """What `loss.backward()` has to run in: with `compiled_autograd` its compilation as one graph, otherwise nothing.

    Example:
        >>> with backward_context(ParallelConfig()):
        ...     torch.ones((), requires_grad=True).backward()
    """
    if config.compile is None or not config.compile.compiled_autograd:
        return nullcontext()
    return torch._dynamo.utils.maybe_enable_compiled_autograd(True)

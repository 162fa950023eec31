"""How the loss of a model would run that was not called yet: its forward on a copy of it without memory."""

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from shared_specs.config import Tiling
from tiled_torch.models.heads.run import HeadRun
from tiled_torch.models.heads.swap import swapped

NOT_CALLED = "unknown: it was not called with labels yet"


class Zeros(TorchDispatchMode):
    """Every number that code asks a tensor without memory for is 0, and nothing in it differs from 0.

    asked: whether code did so. answer: 1 instead of 0, and one place that differs, to see whether anything depends on it.
    """

    asked = False

    def __init__(self, answer: int = 0) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                self.asked = True
                kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
                return kind(self._answer)
            if func is torch.ops.aten.nonzero.default:
                self.asked = True
                return torch.empty((self._answer, args[0].dim()), dtype=torch.long, device="meta")
        return func(*args, **(kwargs or {}))


def planned_path(model: Any, untiled: type[Any], head_of: Any, labels: str) -> str:
    """Return the path of a model that is of this class before it is tiled; or that it is not known, and why.

    labels: the argument of forward that they are.
    """
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            twin = _built(untiled, model.config) if isinstance(model, PreTrainedModel) else without_memory(model).eval()
            ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
            name, head = head_of(twin)
            run = HeadRun(name, head, Tiling(), "auto", planned=True)
            with Zeros(), swapped(head, run):
                if isinstance(model, PreTrainedModel):
                    untiled.forward(twin, input_ids=ids, labels=ids)
                else:
                    untiled.forward(twin, ids, **{labels: ids})
    except Exception as error:  # of code that is not ours, which may need more than tokens, or their values
        return f"{NOT_CALLED}, and without values its forward ends in {type(error).__name__}"
    return run.path


def _built(untiled: type[Any], config: Any) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return untiled(config).eval()


def without_memory(model: nn.Module) -> Any:
    """Return a copy of a model of which nobody knows how it is made: all but its parameters and buffers, untiled."""
    twin = copied_without_memory(model)
    for module in twin.modules():
        module.__class__ = getattr(type(module), "_untiled", type(module))
    return twin


def copied_without_memory(model: nn.Module) -> Any:
    """Return a copy of a model as it is on the meta device: its parameters, buffers and other tensors have no values."""
    plain = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    found: dict[int, Any] = {
        id(tensor): torch.empty_like(tensor, device="meta") for tensor in (*plain, *model.buffers())
    }
    found |= {id(parameter): _empty(parameter) for parameter in model.parameters()}
    return copy.deepcopy(model, found)


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

"""AdamW as the options have it: which parameters decay, the learning rate of each step, and the length of the gradient."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shared_specs.app.finetune.schedule import decays, learning_rate
from shared_specs.app.finetune.trainer import ADAMW
from shared_specs.app.options import FinetuneOptions


def adamw(parameters: Mapping[str, Tensor], options: FinetuneOptions) -> torch.optim.AdamW:
    """Return the optimizer of these parameters, by their Hugging Face names."""
    groups = [
        {
            "params": [parameter for name, parameter in parameters.items() if decays(name.split(".")) is wanted],
            "weight_decay": options.weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(ADAMW.beta1, ADAMW.beta2),
        eps=ADAMW.eps,
        fused=True,  # no temporaries of the size of the model
    )


def update(optimizer: torch.optim.Optimizer, options: FinetuneOptions) -> Tensor | None:
    """Do one update with the gradients that are there, and give them up. Return their norm; None without `--clip`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state.get(parameters[0])
    rate = float(learning_rate(options, float(state["step"]) if state else 0.0))
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = None if options.clip is None else clip(parameters, options.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def clip(parameters: Iterable[Tensor], longest: float) -> Tensor:
    """Scale all gradients down to this norm where they are longer, and return the norm that they had.

    It is that of the whole gradients, of DTensors as of tensors: those of ranks that have parts are added up, and what every
    rank has counts once. torch.nn.utils.clip_grad_norm_ stacks the norms of all parameters, which those of different meshes
    or layouts cannot be.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = []
    for _, alike in groupby(sorted(gradients, key=_layout), key=_layout):
        norm: Any = torch.nn.utils.get_total_norm(list(alike))
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (longest / total).clamp(max=1.0)
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return total


def _layout(gradient: Tensor) -> str:
    """Return what gradients whose norms are stacked have in common."""
    return f"{gradient.device_mesh} {gradient.placements}" if isinstance(gradient, DTensor) else ""

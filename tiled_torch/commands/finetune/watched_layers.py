"""Tells when a layer of a model is through its forward or its backward, by hooks that change nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.app.finetune.step_progress import Heard


def watch_layers(layers: Sequence[nn.Module], heard: Heard) -> None:
    """Call heard("forward" or "backward", number of layers) from now on, whenever one of these modules is through.

    A layer is through its backward when the gradient of the output before it is there; the first one's is not told.

    Args:
        layers: run one behind the other; each returns [.., hidden], or a tuple that begins with it.
    """
    last, count = layers[-1], len(layers)

    def through_backward(_: Tensor) -> None:
        heard("backward", count)

    def through_forward(layer: nn.Module, _: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        heard("forward", count)
        hidden = output[0] if isinstance(output, tuple) else output
        if layer is not last and hidden.requires_grad:
            hidden.register_hook(through_backward)

    for layer in layers:
        layer.register_forward_hook(through_forward)

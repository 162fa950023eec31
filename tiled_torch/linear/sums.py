"""What the tiles of a linear layer share: one input whose gradient is a sum over tiles, and one output that is such a sum.

Both sums are made in float32 for 16-bit tensors and rounded once. Autograd itself would add the gradients of an input
that several tiles read in the input's own dtype, with one rounding for each tile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiled_torch.core.tangents import carry_tangents

_NARROW = (torch.bfloat16, torch.float16)


def shared_input(x: Tensor, tiles: int) -> Callable[[], Tensor]:
    """Return x for each of several tiles, without a copy of it; its gradient is summed in float32 and rounded once.

    A tensor subclass (DTensor) is handed out as it is, and so is a dual tensor of forward mode, whose tangent the nodes below
    would drop: its gradient is summed in its own dtype.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not carry_tangents([x])
    if tiles == 1 or x.dtype not in _NARROW or not plain or not _needs_gradient(x):
        return lambda: x
    anchor, detached = _Anchor.apply(x), x.detach()
    return lambda: _Use.apply(detached, anchor)


def add_partial(index: int, total: Tensor | None, partial: Tensor) -> Tensor:
    """total + the partial result number `index` in float32 (float64 for float64); written into total where that is ours."""
    if total is None:
        return partial.float() if partial.dtype in _NARROW else partial
    # The first partial itself belongs to the layer that made it: engines hang hooks on it.
    ours = index > 1 or total.dtype != partial.dtype
    return total.add_(partial) if ours else total + partial


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


class _Anchor(torch.autograd.Function):
    """One float32 element seen in the shape of x: where the gradients of all uses of x meet."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx.to(ctx.dtype)


class _Use(torch.autograd.Function):
    """x again; its gradient goes to the anchor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plain: Tensor, anchor: Tensor) -> Tensor:
        return plain.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor]:
        return None, dx.float()

"""What one shard of the MLP computes, step by step: by PyTorch operations, which run on every device.

`mlp/steps_kernels.py` has the same steps by Triton kernels; the loops of `mlp/loops.py` take either.
Letters: t tokens of the shard, H hidden, I intermediate. Every method works on the rows of one shard.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiled_torch.core.gradients import Sums
from tiled_torch.mlp.math import combine_, combine_backward


class Weights(NamedTuple):
    """Operands of one MLP besides x. w_gate, w_up: [I, H]; w_down: [H_out, I]. w_gate None: a plain two-matrix MLP."""

    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None

    def cast(self, dtype: torch.dtype) -> "Weights":
        cast: Any = (None if w is None else w.to(dtype) for w in self)
        return Weights(*cast)


class Steps(Sums):
    """The steps by PyTorch operations: products by the vendor's library, elementwise work by row blocks."""

    def buffers(self, count: int, longest: int, like: Tensor, width: int) -> list[Tensor]:
        """Scratch of one call: `count` times [longest, width], which every shard reuses."""
        return [torch.empty((longest, width), dtype=like.dtype, device=like.device) for _ in range(count)]

    def scratch(self, buffers: list[Tensor], tokens: int) -> list[Tensor]:
        """Return the buffers of one shard, [tokens, width] once they are written."""
        return [buffer[:tokens] for buffer in buffers]

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """x @ w.T + bias into out."""
        return torch.mm(x, w.T, out=out) if bias is None else torch.addmm(bias, x, w.T, out=out)

    def up_projections(self, x: Tensor, w: Weights, gate: Tensor | None, up: Tensor) -> None:
        """gate = x @ w_gate.T + b_gate and up = x @ w_up.T + b_up, written into the buffers given."""
        if w.w_gate is not None and gate is not None:
            self.linear(x, w.w_gate, w.b_gate, gate)
        self.linear(x, w.w_up, w.b_up, up)

    def combine(self, activation: str, gate: Tensor | None, up: Tensor, h: Tensor) -> Tensor:
        """h = act(gate) * up, or act(up) without a gate, into h, which may be gate (or up)."""
        return combine_(activation, gate, up, h)

    def hidden(self, activation: str, x: Tensor, w: Weights, scratch: list[Tensor]) -> Tensor:
        """h of one shard from x. scratch: two buffers [t, I] (one without a gate), of which h may be one."""
        gate = None if w.w_gate is None else self.linear(x, w.w_gate, w.b_gate, scratch[0])
        return self.combine(activation, gate, self.linear(x, w.w_up, w.b_up, scratch[-1]), scratch[0])

    def hidden_gradients(
        self, activation: str, dy: Tensor, w: Weights, gate: Tensor | None, up: Tensor, scratch: list[Tensor]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return (dgate, h, dup) of one shard, in scratch: three buffers [t, I] (two without a gate).

        gate and up are the first of these, or kept ones, which stay as they are.
        """
        *outs, dh = scratch
        torch.mm(dy, w.w_down, out=dh)
        combine_backward(activation, gate, up, dh, (*outs, dh))
        return (outs[0] if gate is not None else None), outs[-1], dh

    def dx(self, dgate: Tensor | None, dup: Tensor, w: Weights, dx: Tensor) -> None:
        """dx = dup @ w_up + dgate @ w_gate, in the dtype of dx. Nothing of the shard needs h any more."""
        rows = dx if dx.dtype == dup.dtype else torch.empty_like(dx, dtype=dup.dtype)
        torch.mm(dup, w.w_up, out=rows)
        if dgate is not None and w.w_gate is not None:
            rows.addmm_(dgate, w.w_gate)
        if rows is not dx:
            dx.copy_(rows)


EAGER = Steps()

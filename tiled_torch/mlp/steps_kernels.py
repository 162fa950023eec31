"""The steps of one shard by Triton kernels, and by the vendor's library where a record says that it is faster."""

import torch
from torch import Tensor

from shared_specs.kernels.blocks import Paths, paths_for
from tiled_torch.core import launch
from tiled_torch.core.tensors import dtype_name
from tiled_torch.mlp.kernels.dgated import dgated
from tiled_torch.mlp.kernels.glu_elementwise import glu_backward, glu_forward
from tiled_torch.mlp.kernels.glu_up import glu_up, glu_up_auxiliary
from tiled_torch.mlp.kernels.linear import dx as dx_kernel
from tiled_torch.mlp.kernels.linear import linear
from tiled_torch.mlp.kernels.weight_gradient import weight_gradient
from tiled_torch.mlp.steps import Steps, Weights


class KernelSteps(Steps):
    """paths: who makes which product. Everything else is a kernel."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if self.paths.products == "vendor":
            return super().linear(x, w, bias, out)
        linear(x, w, bias, out)
        return out

    def up_projections(self, x: Tensor, w: Weights, gate: Tensor | None, up: Tensor) -> None:
        if self.paths.up == "dual" and w.w_gate is not None:
            glu_up(x, w.w_gate, w.w_up, w.b_gate, w.b_up, None, gate, up, "silu")  # no h, so no activation is applied
        else:
            super().up_projections(x, w, gate, up)

    def combine(self, activation: str, gate: Tensor | None, up: Tensor, h: Tensor) -> Tensor:
        glu_forward(gate, up, h, activation)
        return h

    def hidden(self, activation: str, x: Tensor, w: Weights, scratch: list[Tensor]) -> Tensor:
        h = scratch[0]
        if w.w_gate is None or self.paths.up == "vendor":
            return super().hidden(activation, x, w, scratch)
        if self.paths.up == "dual":
            glu_up(x, w.w_gate, w.w_up, w.b_gate, w.b_up, h, None, None, activation)
        else:
            gate = self.linear(x, w.w_gate, w.b_gate, scratch[1])
            glu_up_auxiliary(x, w.w_up, w.b_up, gate, h, activation)
        return h

    def hidden_gradients(
        self, activation: str, dy: Tensor, w: Weights, gate: Tensor | None, up: Tensor, scratch: list[Tensor]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        if gate is not None and self.paths.down == "dgated":
            dgate, dup, h = scratch
            dgated(dy, w.w_down, gate, up, dgate, dup, h, activation)
            return dgate, h, dup
        *outs, dh = scratch
        if self.paths.products == "vendor":
            torch.mm(dy, w.w_down, out=dh)
        else:
            dx_kernel(None, dy, None, w.w_down, dh)
        dgate, h = (outs[0] if gate is not None else None), outs[-1]
        glu_backward(gate, up, dh, dgate, dh, h, activation)
        return dgate, h, dh

    def dx(self, dgate: Tensor | None, dup: Tensor, w: Weights, dx: Tensor) -> None:
        if self.paths.products == "vendor":
            super().dx(dgate, dup, w, dx)
            return
        rows = dx if dx.dtype == dup.dtype else torch.empty_like(dx, dtype=dup.dtype)
        dx_kernel(dgate, dup, w.w_gate if dgate is not None else None, w.w_up, rows)
        if rows is not dx:  # x is wider than the products, whose blocks are sized for a result of their own dtype
            dx.copy_(rows)

    def add_product(self, acc: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
        if self.paths.weight_gradient == "vendor":
            super().add_product(acc, a, b, first=first)
        else:
            weight_gradient(acc, a, b, not first)

    def add_rows(self, acc: Tensor, d: Tensor, *, first: bool) -> None:
        if self.paths.weight_gradient == "vendor":
            super().add_rows(acc, d, first=first)
        else:  # the same order of additions at every shard count
            weight_gradient(acc[:, None], d, d.new_ones(d.shape[0], 1), not first)


def fastest_paths(x: Tensor, weights: Weights, dtype: torch.dtype) -> Paths:
    """Return the paths of one call on x's device, by its records."""
    name, shape = dtype_name(dtype), (weights.w_up.shape[0], x.shape[-1])
    return paths_for("triton", launch.architecture(x.device), name, shape)

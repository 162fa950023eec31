"""The elementwise work around products of a vendor library, in one pass each and in place: forward and backward.

Buffers are [t, I] and contiguous; elementwise work is float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch
from tiled_torch.core.triton_blocks import activate, activation_gradient


@triton.jit
def forward_kernel(gate, up, h, elements, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value = activate(tl.load(gate + i, mask=inside, other=0.0).to(tl.float32), ACTIVATION) * u
    else:
        value = activate(u, ACTIVATION)
    tl.store(h + i, value.to(h.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    gate, up, dh, dgate, dup, h, elements, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + i, mask=inside, other=0.0).to(tl.float32)
    kind = h.dtype.element_ty
    if GATED:
        g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
        act = activate(g, ACTIVATION)
        tl.store(h + i, (act * u).to(kind), mask=inside)
        tl.store(dup + i, (d * act).to(kind), mask=inside)
        tl.store(dgate + i, activation_gradient(g, d * u, ACTIVATION).to(kind), mask=inside)
    else:
        tl.store(h + i, activate(u, ACTIVATION).to(kind), mask=inside)
        tl.store(dup + i, activation_gradient(u, d, ACTIVATION).to(kind), mask=inside)


def _launch(kernel: object, buffers: list[Tensor | None], activation: str) -> None:
    up = buffers[1]
    assert up is not None
    if not all(a is None or a.is_contiguous() for a in buffers):
        raise ValueError("glu_elementwise: buffers must be contiguous")
    sizes = launch.blocks("glu_elementwise", up, (up.shape[1],))
    launch.start(
        kernel, triton.cdiv(up.numel(), sizes.columns), *buffers, up.numel(), blocks=sizes, ACTIVATION=activation,
        GATED=buffers[0] is not None, BLOCK=sizes.columns,
    )  # fmt: skip


@launch.register("glu_forward", mutates=("h",))
def glu_forward(gate: Tensor | None, up: Tensor, h: Tensor, activation: str) -> None:
    """h = act(gate) * up, or act(up) without a gate. gate, up, h: [t, I]; h may be gate or up."""
    _launch(forward_kernel, [gate, up, h], activation)


@launch.register("glu_backward", mutates=("dgate", "dup", "h"))
def glu_backward(
    gate: Tensor | None, up: Tensor, dh: Tensor, dgate: Tensor | None, dup: Tensor, h: Tensor, activation: str
) -> None:
    """From gate, up and dh (all [t, I]): dgate, dup and h, of which each may be any one of the three."""
    _launch(backward_kernel, [gate, up, dh, dgate, dup, h], activation)

"""Elementwise work of the MLP, in place over its [t, I] buffers, a few rows at a time so that temporaries stay in cache.

16-bit buffers are widened to float32 for the elementwise work and rounded once when they are written back.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from shared_specs.mlp.costs import block_rows
from tiled_torch.core.tensors import device_kind, wide_dtype

aten = torch.ops.aten


def _row_blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of the first dim: see `costs.block_rows`."""
    step = block_rows(rows.shape[0], rows.shape[1], device_kind(rows.device))
    for start in range(0, rows.shape[0], step):
        yield slice(start, min(start + step, rows.shape[0]))


def activate_(activation: str, value: Tensor) -> Tensor:
    """act(value), written over value."""
    match activation:
        case "silu":
            return aten.silu_(value)
        case "gelu":
            return aten.gelu_(value)
        case "gelu_tanh":
            return aten.gelu_(value, approximate="tanh")
        case "relu":
            return value.relu_()
        case "relu_squared":
            return value.relu_().square_()
    raise ValueError(f"unknown activation {activation!r}")


def _activate(activation: str, value: Tensor, out: Tensor) -> Tensor:
    """act(value) into out."""
    match activation:
        case "silu":
            return aten.silu.out(value, out=out)
        case "gelu":
            return aten.gelu.out(value, out=out)
        case "gelu_tanh":
            return aten.gelu.out(value, approximate="tanh", out=out)
        case "relu":
            return torch.clamp(value, min=0, out=out)
        case "relu_squared":
            return torch.clamp(value, min=0, out=out).square_()
    raise ValueError(f"unknown activation {activation!r}")


def _activation_gradient(activation: str, dact: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """dact * act'(value) into out, which may be value or dact."""
    match activation:
        case "silu":
            return _into(out, aten.silu_backward, dact, value)
        case "gelu":
            return _into(out, aten.gelu_backward, dact, value)
        case "gelu_tanh":
            return _into(out, aten.gelu_backward, dact, value, approximate="tanh")
        case "relu":
            return _into(out, aten.threshold_backward, dact, value, 0)
        case "relu_squared":
            slope = value.clamp(min=0).mul_(2)
            # Nothing, not 0 times what comes from above, where value is negative: that may be infinite.
            return _into(out, aten.threshold_backward, dact, value, 0).mul_(slope)
    raise ValueError(f"unknown activation {activation!r}")


def _into(out: Tensor, gradient: Any, *args: Any, **options: Any) -> Tensor:
    """Return a fused gradient of PyTorch's, written into out."""
    if graph._allow_mutation_on_saved_tensors_enabled:  # which knows no other name of a result than "out"
        return out.copy_(gradient(*args, **options))
    return gradient.grad_input(*args, **options, grad_input=out)


def combine_(activation: str, gate: Tensor | None, up: Tensor, out: Tensor) -> Tensor:
    """h = act(gate) * up, or act(up) without a gate, into out, which may be gate (or up). All [t, I]."""
    wide = wide_dtype(up.dtype)
    for rows in _row_blocks(up):
        first = up[rows] if gate is None else gate[rows]
        if wide == up.dtype:
            act = _activate(activation, first, out[rows])
            if gate is not None:
                act.mul_(up[rows])
        else:
            act = activate_(activation, first.to(wide))
            out[rows] = act if gate is None else act.mul_(up[rows])
    return out


def combine_backward(activation: str, gate: Tensor | None, up: Tensor, dh: Tensor, outs: tuple[Tensor, ...]) -> None:
    """From gate, up and dh (all [t, I]): gated, outs = (dgate, h, dup); plain, outs = (h, dup).

    Aliasing: dgate may be gate, h may be up, dup may be dh, so that three buffers suffice (two without a gate).
    """
    for rows in _row_blocks(up):
        if gate is None:
            _plain_block(activation, up[rows], dh[rows], *(out[rows] for out in outs))
        else:
            _gated_block(activation, gate[rows], up[rows], dh[rows], *(out[rows] for out in outs))


# One function per block, so that its temporaries are gone before those of the next block are made.
def _gated_block(activation: str, gate: Tensor, up: Tensor, dh: Tensor, dgate: Tensor, h: Tensor, dup: Tensor) -> None:
    wide = wide_dtype(up.dtype)
    if wide == up.dtype:
        act, dact = _activate(activation, gate, torch.empty_like(gate)), dh * up
        torch.mul(act, up, out=h)
        torch.mul(dh, act, out=dup)
        _activation_gradient(activation, dact, gate, dgate)
        return
    gate, up, dh = gate.to(wide), up.to(wide), dh.to(wide)
    act, dact = _activate(activation, gate, torch.empty_like(gate)), dh * up
    h.copy_(up.mul_(act))
    dup.copy_(dh.mul_(act))
    dgate.copy_(_activation_gradient(activation, dact, gate, gate))


def _plain_block(activation: str, up: Tensor, dh: Tensor, h: Tensor, dup: Tensor) -> None:
    wide = wide_dtype(up.dtype)
    up_wide, dh_wide = up.to(wide), dh.to(wide)
    act = _activate(activation, up_wide, torch.empty_like(up_wide))
    if wide == up.dtype:
        _activation_gradient(activation, dh, up, dup)
    else:
        dup.copy_(_activation_gradient(activation, dh_wide, up_wide, dh_wide))
    h.copy_(act)

"""The steps of the MLP on a CPU whose own instructions oneDNN uses and Intel's library (MKL) does not.

PyTorch computes float32 products by MKL, which on processors of other makers stays below what their AVX-512 units can do
(in the records of `bench --op mlp` all of `tiled-keep-1` takes less time than MKL's products alone, `products-18`). oneDNN,
which PyTorch brings along for other dtypes, compiles its own code for the processor at hand. Its operator returns new memory
and cannot write into a buffer. So here a buffer is empty until a product gives it its memory, and is emptied before the next
one: never more than the buffers of `Steps`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from shared_specs.shards import ShardPlan
from tiled_torch.mlp.math import combine_backward
from tiled_torch.mlp.steps import Steps, Weights

# Below so many multiplications what oneDNN prepares for each new shape costs more than it saves.
SMALLEST = 2**24
_FACTS = Path("/proc/cpuinfo")


@cache
def pays_here() -> bool:
    """Return whether this machine has the operator, and a processor on which it is the faster one: AMD's with AVX-512."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not there or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return _FACTS.exists() and "AuthenticAMD" in _FACTS.read_text()


def pays(x: Tensor, w: Weights, plan: ShardPlan, dtype: torch.dtype) -> bool:
    """Return whether the steps below take less time than PyTorch's in the loops over one plan.

    Their products return rows [t, H] while only two buffers [t, I] are in use, so that 2 H <= I keeps the peak.
    `torch.backends.mkldnn.flags(enabled=False)` switches them off.
    """
    I, H = w.w_up.shape  # noqa: E741
    H = max(H, w.w_down.shape[0])
    if x.device.type != "cpu" or dtype != torch.float32 or 2 * H > I or plan.longest * H * I < SMALLEST:
        return False
    if not (pays_here() and torch.backends.mkldnn.enabled):
        return False
    # A tensor of another class has products of its own.
    return all(type(a) in (Tensor, torch.nn.Parameter) for a in (x, *w) if a is not None)


def product(a: Tensor, w: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """a @ w.T + bias + added in new memory. a: [t, K]; w: [N, K], or the transpose of a [K, N]; added: [t, N]."""
    if not (a.is_contiguous() and (w.is_contiguous() or w.T.is_contiguous())):
        found = torch.mm(a, w.T) if bias is None else torch.addmm(bias, a, w.T)
        return found if added is None else found.add_(added)
    if added is None:
        return torch.ops.mkldnn._linear_pointwise(a, w, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(a, added, w, bias, "add")


def _flop(a: Any, w: Any, third: Any, *_: Any, **__: Any) -> int:
    """Return FLOP of both forms, from shapes: (a [t, K], w [N, K], bias) and, with something added, (a, what is added, w)."""
    return 2 * a[0] * a[1] * (third if third is not None and len(third) == 2 else w)[0]


# torch.utils.flop_counter counts no product of oneDNN's by itself.
if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flop)


def up_projections_of_rows(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """gate and up [rows, I] (gate [0, I] without a gate), in one product each: what is kept needs its memory anyway."""
    up = product(x, w.w_up, w.b_up)
    return torch.empty_like(up[:0]) if w.w_gate is None else product(x, w.w_gate, w.b_gate), up


class OneDNNSteps(Steps):
    """Of one call: it knows which tensors are its buffers."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def buffers(self, count: int, longest: int, like: Tensor, width: int) -> list[Tensor]:
        self._buffers = [like.new_empty((0, width)) for _ in range(count)]
        return self._buffers

    def scratch(self, buffers: list[Tensor], tokens: int) -> list[Tensor]:
        return list(buffers)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        return self._into(out, lambda: product(x, w, bias))

    def combine(self, activation: str, gate: Tensor | None, up: Tensor, h: Tensor) -> Tensor:
        return super().combine(activation, gate, up, self._room(h, up))

    def hidden_gradients(
        self, activation: str, dy: Tensor, w: Weights, gate: Tensor | None, up: Tensor, scratch: list[Tensor]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        *outs, dh = scratch
        for out in outs:
            self._room(out, up)
        self.linear(dy, w.w_down.T, None, dh)
        combine_backward(activation, gate, up, dh, (*outs, dh))
        return (outs[0] if gate is not None else None), outs[-1], dh

    def dx(self, dgate: Tensor | None, dup: Tensor, w: Weights, dx: Tensor) -> None:
        h: Any = self._buffers[-2]
        h.set_()  # two buffers and the rows below are fewer bytes than three
        rows = product(dup, w.w_up.T)
        if dgate is not None and w.w_gate is not None:
            rows = product(dgate, w.w_gate.T, added=rows)
        dx.copy_(rows)

    def _into(self, out: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, as the memory of a buffer, or copied into a tensor of the caller's."""
        if not self._owns(out):
            return out.copy_(make())
        out.set_()
        return out.set_(make())

    def _room(self, buffer: Tensor, like: Tensor) -> Tensor:
        """Return the buffer with memory of its own for so many rows."""
        if self._owns(buffer) and buffer.shape != like.shape:
            self._into(buffer, lambda: torch.empty_like(like, memory_format=torch.contiguous_format))
        return buffer

    def _owns(self, tensor: Tensor) -> bool:
        return any(tensor is buffer for buffer in self._buffers)

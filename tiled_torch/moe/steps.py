"""Who multiplies some rows with the weights of their experts: one expert at a time, or several by one grouped product.

PyTorch's grouped product, `torch.nn.functional.grouped_mm`, is one kernel for bfloat16 on NVIDIA GPUs of compute capability 9
and 10 (GroupedBlas.cpp), and one call on a CPU. On other GPUs it reads the groups on the host and multiplies them one after the
other, which the loop does without reading. One launch for many experts is for few rows of each: with many it is no faster than
one product after the other (pytorch/pytorch#163425), so that several experts are taken that have no more rows than a shard.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tiled_torch.core.operands import has_values
from tiled_torch.moe.routes import ExpertPart, ExpertRows

_ALIGNED = 16  # bytes of rows and addresses that the grouped kernel asks for


class ExpertWeights(NamedTuple):
    """The parameters of experts. up: [E, W, H]; down: [E, H_out, I]; each [E, in, out] where they are transposed.

    gate: [E, I, H] where gate and up are two parameters; up then is [E, I, H], and the columns of the first product are gate's
    and then up's.
    """

    up: Tensor
    down: Tensor
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    gate: Tensor | None = None

    def width(self, transposed: bool) -> int:
        """Return I, the columns between an expert's products."""
        return self.down.shape[-2 if transposed else -1]


@dataclass(frozen=True)
class OneExpert:
    """Products of rows [n, ...] that are all of one expert. w: its weights, of two dims, in the dtype of the rows."""

    w: ExpertWeights
    transposed: bool

    def first(self, x: Tensor) -> Tensor:
        """x W_up + b_up [n, W]."""
        w = self.w
        if w.gate is None:
            return self._linear(x, w.up, w.b_up)
        both = torch.empty((x.shape[0], 2 * w.width(self.transposed)), dtype=x.dtype, device=x.device)
        for half, each in zip(both.chunk(2, dim=1), (w.gate, w.up), strict=True):
            torch.mm(x, each if self.transposed else each.T, out=half)
        return both

    def second(self, h: Tensor) -> Tensor:
        """h W_down + b_down [n, H_out]."""
        return self._linear(h, self.w.down, self.w.b_down)

    def gradient_of_h(self, dy: Tensor) -> Tensor:
        """dy W_down^T [n, I]."""
        return dy @ (self.w.down.T if self.transposed else self.w.down)

    def gradient_of_x(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [n, H] from the gradients of the columns of each weight."""
        weights = [a.T if self.transposed else a for a in (self.w.gate, self.w.up) if a is not None]
        dx = parts[0] @ weights[0]
        for d, weight in zip(parts[1:], weights[1:], strict=True):
            dx.addmm_(d, weight)
        return dx

    def times_bias(self, dy: Tensor) -> Tensor:
        """<dy, b_down> [n]."""
        assert self.w.b_down is not None
        return dy @ self.w.b_down.to(dy.dtype)

    def _linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        w = w if self.transposed else w.T
        return x @ w if bias is None else torch.addmm(bias, x, w)


@dataclass(frozen=True)
class SeveralExperts:
    """Products of rows [n, ...] in the order of their experts. w: the weights of these, [G, ...], in the dtype of the rows.

    ends: [G], int32: where the rows of each expert end. parts: the same for the host, of the experts that have any.
    """

    w: ExpertWeights
    transposed: bool
    ends: Tensor
    parts: Sequence[ExpertPart]

    def first(self, x: Tensor) -> Tensor:
        """x W_up + b_up [n, W]."""
        w = self.w
        if w.gate is None:
            return self._add_bias(self._grouped(x, self._flipped(w.up)), w.b_up)
        both = torch.empty((x.shape[0], 2 * w.width(self.transposed)), dtype=x.dtype, device=x.device)
        for half, each in zip(both.chunk(2, dim=1), (w.gate, w.up), strict=True):
            half.copy_(self._grouped(x, self._flipped(each)))
        return both

    def second(self, h: Tensor) -> Tensor:
        """h W_down + b_down [n, H_out]."""
        return self._add_bias(self._grouped(h, self._flipped(self.w.down)), self.w.b_down)

    def gradient_of_h(self, dy: Tensor) -> Tensor:
        """dy W_down^T [n, I]."""
        return self._grouped(dy, self._straight(self.w.down))

    def gradient_of_x(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [n, H] from the gradients of the columns of each weight."""
        weights = [self._straight(a) for a in (self.w.gate, self.w.up) if a is not None]
        dx = self._grouped(parts[0], weights[0])
        for d, weight in zip(parts[1:], weights[1:], strict=True):
            dx += self._grouped(d, weight)
        return dx

    def times_bias(self, dy: Tensor) -> Tensor:
        """<dy, b_down> [n], each row with its expert's."""
        assert self.w.b_down is not None
        first, bias = self.parts[0].expert, self.w.b_down.to(dy.dtype)
        return torch.cat([dy[part.rows] @ bias[part.expert - first] for part in self.parts])

    def _add_bias(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            first = self.parts[0].expert
            for part in self.parts:
                rows[part.rows] += bias[part.expert - first]
        return rows

    def _flipped(self, w: Tensor) -> Tensor:
        return w if self.transposed else w.mT

    def _straight(self, w: Tensor) -> Tensor:
        return w.mT if self.transposed else w

    def _grouped(self, rows: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(rows, w, offs=self.ends)


Products = OneExpert | SeveralExperts


def products_of(w: ExpertWeights, run: ExpertRows, dtype: torch.dtype, transposed: bool) -> Products:
    """Return the products of the rows of one run. w: of all experts; those of one are cast to dtype."""
    if len(run.counts) == 1:
        one = (None if a is None else a[run.expert].to(dtype) for a in w)
        return OneExpert(ExpertWeights(*one), transposed)  # type: ignore[arg-type]
    several = (None if a is None else a[run.experts] for a in w)
    ends = run.sizes.cumsum(0, dtype=torch.int32)
    return SeveralExperts(ExpertWeights(*several), transposed, ends, run.parts(run.pieces[0]))  # type: ignore[arg-type]


def takes_several(w: ExpertWeights, dtype: torch.dtype) -> bool:
    """Return whether the grouped kernel takes several experts with these weights at once.

    Weights of another dtype than that of the products are not: they are cast for one expert at a time.
    """
    # Of tensors without values PyTorch knows the grouped product in bfloat16 alone.
    if not _has_kernel(w.up.device, dtype) or not (has_values(w.up) or dtype == torch.bfloat16):
        return False
    known = [a for a in w if a is not None]
    matrices = [a for a in (w.up, w.down, w.gate) if a is not None]
    return all(a.dtype == dtype for a in known) and all(_is_aligned(a) for a in matrices)


def _is_aligned(w: Tensor) -> bool:
    """Return whether rows of the matrices [E, ., .], and of what they multiply, begin where the kernel can read."""
    sizes = all(size * w.element_size() % _ALIGNED == 0 for size in w.shape[1:])
    return sizes and w.is_contiguous() and (not has_values(w) or w.data_ptr() % _ALIGNED == 0)


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a grouped product on this device is one call that waits for nothing."""
    if device.type == "cpu":
        return dtype in (torch.float32, torch.bfloat16)
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip or sys.platform == "win32":
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] in (9, 10)

"""The gradient of one parameter of experts, [E, ...]: only experts that had rows are computed or added to."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tiled_torch.core.gradients import SUMS, takes_sums_of
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.moe.routes import ExpertPart


class ExpertSum:
    """Sums of products over the pieces of an expert, in float32 (float64 for float64), each cast once.

    Where every expert comes once (`once`), one expert's float32 sum exists at a time, and none where its rows are one piece.
    Else those of all experts do. Sums live in the parameter's `main_grad` where a training framework provides one that is
    wide enough, else, where the parameter itself is, in the gradient.
    """

    def __init__(self, parameter: Tensor, main_grad: Tensor | None, *, once: bool) -> None:
        self.dtype, self.main_grad, self.once = parameter.dtype, main_grad, once
        self.into_main = main_grad is not None and takes_sums_of(main_grad, self.dtype)
        wide = wide_dtype(self.dtype)
        if self.into_main and main_grad is not None:
            self.whole = main_grad.view(parameter.shape)
        else:
            dtype = self.dtype if once else wide
            self.whole = torch.empty_like(parameter, dtype=dtype)  # in its layout, which a view's own gradient keeps
        self.begun = [self.into_main] * parameter.shape[0]
        self.scratch: Tensor | None = None
        self.current, self.first = self.whole[:0], True

    def add_products(self, parts: Sequence[ExpertPart], a: Tensor, b: Tensor) -> None:
        """Add a.T @ b of the rows of each expert to its sum. a: [n, rows]; b: [n, columns]."""
        self._add(parts, lambda rows, first: SUMS.add_product(self.current, a[rows], b[rows], first=first))

    def add_rows(self, parts: Sequence[ExpertPart], d: Tensor) -> None:
        """Add d.sum(0) of the rows of each expert to its sum. d: [n, columns]."""
        self._add(parts, lambda rows, first: SUMS.add_rows(self.current, d[rows], first=first))

    def _add(self, parts: Sequence[ExpertPart], add: Callable[[slice, bool], None]) -> None:
        for part in parts:
            if part.first:
                self._start(part.expert, part.pieces)
            add(part.rows, self.first)
            self.first = False
            if part.last:
                self._end()

    def _start(self, expert: int, pieces: int) -> None:
        """Begin with the rows of one expert in one group."""
        row, self.expert = self.whole[expert], expert
        if not self.into_main and pieces > 1 and row.dtype != wide_dtype(self.dtype):
            if self.scratch is None:
                self.scratch = torch.empty_like(row, dtype=wide_dtype(self.dtype))
            self.current, self.first = self.scratch, True
        else:
            self.current, self.first = row, not self.begun[expert]

    def _end(self) -> None:
        """End the rows of one expert in one group."""
        self.begun[self.expert] = True
        if self.current is self.scratch:
            self.whole[self.expert].copy_(self.current)

    def result(self) -> Tensor | None:
        """Return the gradient in the parameter's dtype, 0 for experts without rows; None where `main_grad` has it."""
        if self.into_main:
            return None
        for expert, begun in enumerate(self.begun):
            if not begun:
                self.whole[expert].zero_()
        if self.main_grad is not None:
            self.main_grad.view(self.whole.shape).add_(self.whole)
            return None
        return self.whole.to(self.dtype)

"""Gradients put together from the parts that shards give: rows of an argument, or the sum for a whole tensor."""

import torch
from torch import Tensor

from tiled_torch.core.gradients import main_grad_of, returned_gradient, takes_sums_of
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.tile.token_layout import Place


class RowGradient:
    """Gradient of a tensor with one row per token: every shard's rows are written once, in place.

    all_written: whether the shards have all tokens; zeros where they do not.
    """

    def __init__(self, tensor: Tensor, tokens: int, *, all_written: bool = True) -> None:
        self.tensor, self.tokens = tensor, tokens
        self.make = torch.empty if all_written else torch.zeros
        self.rows: Tensor | None = None
        self.whole: Tensor | None = None
        self.missing: list[Place] = []

    def add(self, part: Tensor | None, place: Place) -> None:
        if part is None:
            self.missing.append(place)
            return
        if self.rows is None:
            self.whole = self.make(self.tensor.shape, dtype=part.dtype, device=part.device)
            self.rows = self.whole.view(self.tokens, *part.shape[1:])
        self.rows[place] = part

    def result(self) -> Tensor | None:
        """Return the gradient; None where no shard depends on the tensor, as in the untiled function."""
        if self.rows is not None:
            for place in self.missing:
                self.rows[place] = 0
        return self.whole


class WholeGradient:
    """Gradient of a tensor that every shard sees whole: summed in float32 (float64 for float64) and cast once.

    The sum goes straight into the tensor's `main_grad` where a training framework provides one (Megatron's convention); into
    one of 16 bits when it is complete.
    """

    def __init__(self, tensor: Tensor, *, single: bool) -> None:
        self.tensor, self.single = tensor, single
        self.main_grad = main_grad_of(tensor)
        self.acc: Tensor | None = None
        self.reached = False

    def add(self, part: Tensor | None, _: Place) -> None:
        if part is None:
            return
        self.reached = True
        if self.main_grad is not None and takes_sums_of(self.main_grad, part.dtype):
            self.main_grad.view(part.shape).add_(part)
        elif self.single:
            self.acc = part
        elif self.acc is None:
            wide = part.dtype if part.dtype.is_complex else wide_dtype(part.dtype)
            self.acc = part.to(wide, copy=True)  # a copy: autograd may have returned a tensor it still uses
        else:
            self.acc.add_(part)

    def result(self) -> Tensor | None:
        """Return the gradient; None where no shard depends on the tensor, or where its gradient already is in `main_grad`."""
        if not self.reached:
            return None
        if self.main_grad is None:
            return None if self.acc is None else self.acc.to(self.tensor.dtype)
        if self.acc is not None:
            self.main_grad.view(self.acc.shape).add_(self.acc)
        return returned_gradient(self.tensor, None)

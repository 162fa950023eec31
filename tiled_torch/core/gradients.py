"""The gradient of one parameter, summed over shards in float32 and cast once at the end."""

from collections.abc import Sequence
from typing import Any, Never, Self

import torch
from torch import Tensor

from shared_specs.errors import UnsupportedError
from tiled_torch.core.tensors import is_dtensor, wide_dtype

_ADDED = "grad_added_to_main_grad"  # on a parameter: Megatron asks to be told


class Sums:
    """Additions to an accumulator, by PyTorch operations."""

    def add_product(self, acc: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
        """acc += a.T @ b, or acc = a.T @ b for the first shard, in the accumulator's dtype. a: [t, M]; b: [t, N]."""
        if a.dtype == acc.dtype:
            if first:
                torch.mm(a.T, b, out=acc)
            else:
                acc.addmm_(a.T, b)
        elif a.device.type == "cpu":  # CPU products cannot return float32 from 16-bit operands
            if first:
                torch.mm(a.T.to(acc.dtype), b.to(acc.dtype), out=acc)
            else:
                acc.addmm_(a.T.to(acc.dtype), b.to(acc.dtype))
        elif first:
            torch.mm(a.T, b, out_dtype=acc.dtype, out=acc)
        else:
            torch.addmm(acc, a.T, b, out_dtype=acc.dtype, out=acc)

    def add_rows(self, acc: Tensor, d: Tensor, *, first: bool) -> None:
        """acc += d.sum(0), or acc = d.sum(0) for the first shard, in the accumulator's dtype. d: [t, columns]."""
        if first:
            torch.sum(d, 0, dtype=acc.dtype, out=acc)
        else:
            acc += d.sum(0, dtype=acc.dtype)


SUMS = Sums()


class GradientSum:
    """Sum of `a.T @ b` (a weight) or of row sums (a bias) over shards.

    The sum lives in the parameter's `main_grad` where a training framework provides one that is as wide (Megatron's
    convention), else in one float32 buffer (float64 for float64), which is the returned gradient itself when the parameter
    has that dtype. With a single shard nothing is summed, so the product is written in the parameter's own dtype. A 16-bit
    `main_grad` gets the finished sum in one addition, which is rounded once.
    """

    def __init__(self, parameter: Tensor, main_grad: Tensor | None, *, single: bool, sums: Sums = SUMS) -> None:
        self.dtype, self.sums = parameter.dtype, sums
        self.main_grad = main_grad
        if main_grad is not None and takes_sums_of(main_grad, self.dtype):
            self.acc, self.empty = main_grad.view(parameter.shape), False
            return
        dtype = self.dtype if single and main_grad is None else wide_dtype(self.dtype)
        self.acc, self.empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device), True

    @classmethod
    def into(cls, buffer: Tensor, sums: Sums = SUMS) -> Self:
        """Return a sum whose accumulator is `buffer`, whatever it holds now."""
        total = cls.__new__(cls)
        total.sums = sums
        total.dtype, total.main_grad, total.acc, total.empty = buffer.dtype, None, buffer, True
        return total

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """acc += a.T @ b, in the accumulator's dtype. a: [t, rows], b: [t, columns]."""
        self.sums.add_product(self.acc, a, b, first=self.empty)
        self.empty = False

    def add_rows(self, d: Tensor) -> None:
        """acc += d.sum(0), in the accumulator's dtype. d: [t, columns]."""
        self.sums.add_rows(self.acc, d, first=self.empty)
        self.empty = False

    def finish(self) -> None:
        """Zero where nothing was added: no tokens."""
        if self.empty:
            self.acc.zero_()

    def result(self) -> Tensor | None:
        """Return the gradient in the parameter's dtype; None where it already is in `main_grad`."""
        if self.main_grad is not None:
            if self.acc.dtype != self.main_grad.dtype and not self.empty:
                self.main_grad.view(self.acc.shape).add_(self.acc)
            return None
        self.finish()
        return self.acc.to(self.dtype)


def takes_sums_of(main_grad: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a `main_grad` is wide enough that the shards of a parameter of `dtype` may be added to it one by one."""
    return torch.promote_types(main_grad.dtype, wide_dtype(dtype)) == main_grad.dtype


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """Return the buffer a training framework wants this parameter's gradient in, if it has one."""
    return None if parameter is None else getattr(parameter, "main_grad", None)


def fused_halves(fused: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of one [2I, ...] parameter, as views of it; where it has a `main_grad`, each with its half of that."""
    gate, up = fused.chunk(2)
    main: Any = main_grad_of(fused)
    if main is None:
        return gate, up
    if torch.compiler.is_compiling():
        refuse_compiled_main_grad()
    for view, half in zip((gate, up), main.view(fused.shape).chunk(2), strict=True):
        part: Any = view
        part.main_grad, part.main_grad_owner = half, fused
        if hasattr(fused, _ADDED):
            part.grad_added_to_main_grad = False
    return gate, up


def refuse_compiled_main_grad() -> Never:
    """Refuse main_grad under torch.compile: a traced backward returns gradients and has no buffers to add to.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "tiled_mlp: main_grad must be None under torch.compile, got a buffer. A compiled backward returns gradients; compile "
        "around the MLP, or let the optimizer read .grad."
    )


def local_main_grad(owner: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Return the buffer for the gradient of an operand that is this rank's part of `owner`, which may be a DTensor.

    shape: of the operand; fewer rows than the owner has are its first ones, the others stand for nothing.
    """
    main = main_grad_of(owner)
    if main is None:
        return None
    main = main.to_local() if is_dtensor(main) else main  # type: ignore[operator]
    return main.view(-1, *shape[1:])[: shape[0]]


def returned_gradient(
    owner: Tensor, gradient: Tensor | None, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return what autograd is to get for a parameter whose gradient went to `main_grad` (gradient None): Megatron's contract.

    Where the parameter carries `grad_added_to_main_grad` the flag is set and a placeholder is returned, so that
    gradient hooks still fire; its values are never read. shape, dtype: of the operand, where it is a part of the owner.
    """
    if gradient is not None or not hasattr(owner, _ADDED):
        return gradient
    setattr(getattr(owner, "main_grad_owner", owner), _ADDED, True)
    zero = torch.zeros((), dtype=dtype or owner.dtype, device=owner.device)
    return zero.expand(owner.shape if shape is None else tuple(shape))

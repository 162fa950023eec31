"""Which calls carry tangents of forward-mode derivatives, and the refusal of those that would lose them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from shared_specs.errors import UnsupportedError, error_text, refusal_text


def carry_tangents(tensors: Iterable[Any]) -> bool:
    """Return whether any of them is a dual tensor of the forward-mode level that is open."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in tensors)


def refuse_tangents(function: str, untiled: str, tensors: Iterable[Any]) -> None:
    """Raise UnsupportedError for what would lose them."""
    if carry_tangents(tensors):
        advice = f"Differentiate {untiled} itself."
        raise UnsupportedError(refusal_text(function, "this call is in forward mode", advice=advice))


def refuse_kernels(function: str, backend: str) -> None:
    """Raise UnsupportedError for kernels that were named, which have no tangents."""
    if backend == "triton":
        advice = 'Tangents are PyTorch\'s own; pass backend="auto".'
        raise UnsupportedError(error_text(function, "backend", "eager in forward mode", repr(backend), advice=advice))

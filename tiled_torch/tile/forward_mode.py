"""Forward-mode derivatives (`torch.autograd.forward_ad`): carried a shard at a time, where nothing requires grad."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from shared_specs.errors import UnsupportedError, refusal_text
from tiled_torch.tile.token_layout import Form


def active() -> bool:
    return forward_ad._current_level >= 0


def on() -> AbstractContextManager[Any]:
    """Tangents go along where a level is active, also inside an autograd function, which switches them off."""
    return forward_ad._set_fwd_grad_enabled(True) if active() else nullcontext()


def tangent_of(value: Any) -> Tensor | None:
    return forward_ad.unpack_dual(value).tangent if isinstance(value, Tensor) else None


def detached(piece: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a leaf with the numbers of `piece`, and with its tangent where it has one."""
    primal, tangent = forward_ad.unpack_dual(piece) if active() else (piece, None)
    leaf = primal.detach().requires_grad_(requires_grad)
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def refuse_both(function: str, results: Iterable[Any], differentiable: Iterable[bool]) -> None:
    """UnsupportedError where results have tangents while backward is to come, or the tangents themselves need a gradient."""
    tangents = [tangent for result in results if (tangent := tangent_of(result)) is not None]
    if tangents and (any(differentiable) or any(tangent.requires_grad for tangent in tangents)):
        refuse(function)


def refuse(function: str) -> None:
    """Refuse forward mode together with backward.

    Raises:
        UnsupportedError: always.
    """
    advice = "Call it under torch.no_grad(), or differentiate fn itself."
    raise UnsupportedError(refusal_text(function, "a call cannot have both tangents and gradients", advice=advice))


class Tangents:
    """The tangents of results, put together from those of shards; zero where a shard has none."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.wholes: dict[int, Tensor] = {}

    def take(self, results: Sequence[Any], forms: Sequence[Form | None], start: int, stop: int) -> list[Any]:
        """Return the results of one shard without their tangents, which are stored."""
        primals: list[Any] = []
        for i, (result, form) in enumerate(zip(results, forms, strict=True)):
            primal, tangent = forward_ad.unpack_dual(result) if isinstance(result, Tensor) else (result, None)
            primals.append(primal)
            if tangent is not None and form is not None:
                if i not in self.wholes:
                    self.wholes[i] = form.room(all_written=False)
                form.rows(self.wholes[i], self.tokens)[start:stop] = tangent.reshape(stop - start, *form.rest)
        return primals

    def give(self, wholes: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [
            forward_ad.make_dual(whole, self.wholes[i]) if whole is not None and i in self.wholes else whole
            for i, whole in enumerate(wholes)
        ]

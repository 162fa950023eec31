"""Which arguments and results of a token-wise function have one row per token, and how a shard of them looks.

No autograd here: `split` describes a call, `Layout.shard` cuts a shard out of it, `Form` says how a result is stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.tile import checks as tile_checks
from shared_specs.tile import token_layout
from shared_specs.tile.token_layout import TokenLayout, first_name, has_rows, leading_dims
from tiled_torch.core.tensors import refuse_dtensor

Place = slice | Tensor  # the tokens of a shard: a run of them, or their numbers [t]


@dataclass(frozen=True)
class Layout(TokenLayout):
    """The arguments of one call without their tensors, so that it can outlive them.

    Args:
        others: flattened arguments, None where a tensor stands. positions: where the tensors stand.
        rowed: per tensor, whether it has one row per token and is cut; the others are passed whole.
        lead, function: as in `TokenLayout`.
    """

    others: tuple[Any, ...]
    spec: pytree.TreeSpec
    positions: tuple[int, ...]
    rowed: tuple[bool, ...]
    lead: tuple[int, ...]
    function: str = "tile"

    def flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return every rowed tensor as [T, ...] (a copy only where leading dims cannot be merged), the others as they are."""
        merged = zip(tensors, self.rowed, strict=True)
        return [t.reshape(self.flat_shape(tuple(t.shape))) if rowed else t for t, rowed in merged]

    def pieces(self, flat: Sequence[Tensor], place: Place) -> list[Tensor]:
        """Return the tokens of a shard of every rowed tensor, the others whole; [t, ...]."""
        return [t[place] if rowed else t for t, rowed in zip(flat, self.rowed, strict=True)]

    def arguments(self, pieces: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call for one shard."""
        leaves = list(self.others)
        for position, piece, rowed in zip(self.positions, pieces, self.rowed, strict=True):
            leaves[position] = piece.unsqueeze(0) if rowed and self.batched else piece
        return pytree.tree_unflatten(leaves, self.spec)


def split(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, function: str = "tile"
) -> tuple[Layout, list[Tensor]]:
    """Return the layout of a call and its tensors; SpecError or TypeError where x cannot be cut."""
    x = args[0] if args else kwargs.get(first_name(fn.forward if isinstance(fn, nn.Module) else fn))
    if not isinstance(x, Tensor):
        fail_type(function, "x, the first argument,", "an array", type(x).__name__)
    lead = leading_dims(function, tuple(x.shape))
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    tensors = [leaves[i] for i in positions]
    for tensor in tensors:
        refuse_dtensor(function, "an argument of fn", tensor, _TO_LOCAL)
    rowed = tuple(t is x or (has_rows(tuple(t.shape), lead) and not isinstance(t, nn.Parameter)) for t in tensors)
    others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Layout(others, spec, positions, rowed, lead, function), tensors


_TO_LOCAL = "Convert it with to_local(), or let the parallel plan of fn's own layers do it."


@dataclass(frozen=True)
class Form(token_layout.Form):
    """How one result is stored, and as what."""

    dtype: torch.dtype
    device: torch.device

    def room(self, *, all_written: bool) -> Tensor:
        """Return what shards write, [*leading dims, ...]: zeros where they do not write all of it."""
        make = torch.empty if all_written else torch.zeros
        return make(self.shape, dtype=self.dtype, device=self.device)

    def anchor(self) -> Tensor:
        """Return one element seen as the whole result: what stands in for it in the graph without memory of its own."""
        return torch.empty_strided(self.shape, (0,) * len(self.shape), dtype=self.dtype, device=self.device)

    def rows(self, whole: Tensor, tokens: int) -> Tensor:
        return whole.reshape(tokens, *self.rest)


def form_of(index: int, result: Any, t: int, layout: Layout) -> Form | None:
    """Return the form of fn's result number `index` for a shard of t tokens; None for a result that is None."""
    if result is None:
        return None
    if not isinstance(result, Tensor):
        fail_type(layout.function, f"output {index} of fn", "an array or None", type(result).__name__)
    refuse_dtensor(layout.function, f"output {index} of fn", result, _TO_LOCAL)
    form = layout.form(index, tuple(result.shape), t)
    return Form(form.shape, form.rest, form.batched, result.dtype, result.device)


def write(function: str, index: int, result: Any, form: Form | None, rows: Tensor | None, place: Place, t: int) -> None:
    """Store the result of one shard of t tokens in its rows, after checking that it has the form of the others."""
    if form is None or rows is None or result is None:
        if form is not None or result is not None:
            fail(function, f"output {index} of fn", "None for every shard or for none", _show(result))
        return
    if isinstance(result, Tensor) and result.shape[:1] != (t,) and result.shape[:2] != (1, t):
        tile_checks.fail_rows(function, index, tuple(result.shape), t)
    if not isinstance(result, Tensor) or tuple(result.shape) != form.shard_shape(t):
        fail(function, f"output {index} of fn", show_shape(form.shard_shape(t)), _show(result))
    if result.dtype != form.dtype:
        fail(function, f"output {index} of fn", f"of dtype {form.dtype} for every shard", result.dtype)
    rows[place] = result.reshape(t, *form.rest)


def _show(result: Any) -> str:
    return show_shape(tuple(result.shape)) if isinstance(result, Tensor) else type(result).__name__

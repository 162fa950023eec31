"""What the ranks run when the layers of inference of the halves are compared: results as lists, and the texts of errors."""

from typing import Any

import torch
from torch import Tensor

from tests.on_torch.ranks_parity_layers import part
from tiled_torch import parallel


def layers(rank: int, world: int, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """The results of every case on this rank."""
    return [_layer(rank, world, **case) for case in cases]


def _layer(
    rank: int,
    world: int,
    function: str,
    operands: dict[str, Any],
    dims: dict[str, int | None],
    arguments: dict[str, Any],
) -> list[Any]:
    """`operands` are whole, weights as torch has them; `dims` says along which dim each of them is split."""
    given = {name: part(torch.tensor(a, dtype=torch.float64), dims[name], rank, world) for name, a in operands.items()}
    with torch.no_grad():
        found = getattr(parallel, function)(**given, **arguments)
    return [a.tolist() for a in ([found] if isinstance(found, Tensor) else found)]


def refusals(rank: int, world: int, calls: list[dict[str, Any]]) -> list[str]:
    """The error of every wrong call, made by rank 0 alone: nothing may be sent."""
    return [_refusal(**call) for call in calls] if rank == 0 else []


def _refusal(function: str, operands: dict[str, Any], arguments: dict[str, Any]) -> str:
    """`operands`: [shape, dtype], or what is no array."""
    given = {
        name: torch.ones(a[0], dtype=getattr(torch, a[1])) if isinstance(a, list) else a for name, a in operands.items()
    }
    try:
        with torch.no_grad():
            getattr(parallel, function)(**given, **arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

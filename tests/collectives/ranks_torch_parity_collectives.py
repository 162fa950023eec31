"""What the ranks run when the collectives of the halves are compared: every rank's results as lists. See tests/ranks.py."""

from typing import Any

import torch

from tiled_torch import parallel


def collectives(rank: int, world: int, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """y and dx of every call on this rank."""
    return [_collective(rank, **call) for call in calls]


def _collective(
    rank: int,
    name: str,
    x: list[Any],
    dy: list[Any],
    shapes: list[list[list[int]]],
    arguments: dict[str, Any],
    own: dict[str, Any],
) -> dict[str, Any]:
    """`x`, `dy`, their `shapes` and the arguments in `own`: of every rank."""
    mine, upstream = (
        torch.tensor(value[rank], dtype=torch.float64).reshape(shape[rank])  # a list cannot say [0, 3]
        for value, shape in zip((x, dy), shapes, strict=True)
    )
    mine.requires_grad_()
    y = getattr(parallel, name)(mine, **arguments, **{key: value[rank] for key, value in own.items()})
    (dx,) = torch.autograd.grad(y, mine, upstream)
    return {key: {"shape": list(a.shape), "values": a.tolist()} for key, a in (("y", y), ("dx", dx))}

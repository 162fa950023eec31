"""What the ranks run when the random streams of the halves are compared: this rank's dropout masks. See tests/ranks.py."""

from typing import Any

import torch
from torch import nn

from shared_specs.layers.random import RANDOM_STREAMS
from tiled_torch.parallel import checkpoint, seed_parallel


def masks(rank: int, world: int, grids: list[list[str]], numbers: int) -> list[dict[str, Any]]:
    """Of every grid of two axes, two ranks each: stream -> what two dropouts, one after the other, keep.

    "again": the same of the second one, as recomputation sees it.
    """
    return [_masks({first: rank // 2, second: rank % 2}, numbers) for first, second in grids]


def _masks(place: dict[str, int], numbers: int) -> dict[str, Any]:
    states, found = seed_parallel(7, **place), dict[str, Any]()
    for stream in RANDOM_STREAMS:
        drawn: list[Any] = []

        def drop(x: torch.Tensor, stream: str = stream, drawn: list[Any] = drawn) -> torch.Tensor:
            with states.fork(stream):
                y = nn.functional.dropout(x, 0.5)
            drawn.append((y.detach() != 0).int().tolist())
            return y.sin()

        drop(torch.ones(numbers))
        checkpoint(drop, torch.ones(numbers, requires_grad=True)).sum().backward()
        found[stream] = drawn
    return found

"""What the ranks run when the sharded layers of the halves are compared: their results as lists. See tests/ranks.py."""

from typing import Any

import torch
from torch import Tensor

from shared_specs.config import ParallelLinearOptions
from tiled_torch import parallel


def part(whole: Tensor, dim: int | None, rank: int, world: int, stride: int = 1) -> Tensor:
    """This rank's stretch along `dim`, of each of `stride` fused parts; None: all of it."""
    if dim is None:
        return whole
    return torch.cat([one.chunk(world, dim)[rank] for one in whole.chunk(stride, dim)], dim)


def layers(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """y and all gradients of this rank's parts, for every case."""
    return [_layer(rank, world, **case) for case in cases]


def _layer(
    rank: int,
    world: int,
    function: str,
    operands: dict[str, Any],
    dims: dict[str, int | None],
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """`operands` are whole, weights as torch has them; `dims` says along which dim each of them and dy is split."""
    given: dict[str, Tensor] = {}
    for name, value in operands.items():
        stride = (
            options.get("stride", 1) if name in ("weight", "bias") and function != "vocab_parallel_embedding" else 1
        )
        tensor = torch.tensor(value, dtype=torch.int64 if name == "ids" else torch.float64)
        given[name] = part(tensor, dims[name], rank, world, stride).clone().contiguous()
    dy = given.pop("dy")
    fixed = {"ids", "weight"} if function == "linear_with_frozen_weight" else {"ids"}
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items() if name not in fixed}
    more = dict(arguments)
    if function != "vocab_parallel_embedding":
        more["options"] = ParallelLinearOptions(**options)
    y = getattr(parallel, function)(**given, **more)
    y.backward(dy)
    return {"y": y.tolist()} | {f"d{name}": leaf.grad.tolist() for name, leaf in leaves.items()}

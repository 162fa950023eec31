"""What the ranks run when the layers of inference of the halves are compared: results as lists, and the texts of errors."""

from typing import Any

import torch
import torch.nn.functional as F
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


def gradients(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every case the gradients of this rank's parts: of the same layers made of pieces that have gradients.

    Cases as in `layers`, with the upstream gradients `dy` of the whole results and the `outputs`, along which dims those
    are split.
    """
    return [_gradients(rank, world, **case) for case in cases]


def _gradients(
    rank: int,
    world: int,
    function: str,
    operands: dict[str, Any],
    dims: dict[str, int | None],
    arguments: dict[str, Any],
    dy: list[Any],
    outputs: list[int | None],
) -> dict[str, Any]:
    given = {
        name: part(torch.tensor(a, dtype=torch.float64), dims[name], rank, world).clone().requires_grad_()
        for name, a in operands.items()
    }
    composed = _norm_column if function == "norm_column_parallel_linear" else _row_norm
    results = composed(given, **arguments)
    upstream = [
        part(torch.tensor(d, dtype=torch.float64), dim, rank, world) for d, dim in zip(dy, outputs, strict=True)
    ]
    found = torch.autograd.grad(results, list(given.values()), upstream)
    return {name: a.tolist() for name, a in zip(given, found, strict=True)}


def _norm_column(given: dict[str, Tensor], eps: float, sequence_parallel: bool = False) -> list[Tensor]:
    """Where each rank normalises its own tokens, the gradients of the norm's weight are added up."""
    weight = given["norm_weight"]
    weight = parallel.copy_to_tensor_parallel_region(weight) if sequence_parallel else weight
    normed = F.rms_norm(given["x"], weight.shape, weight, eps)
    columns = parallel.column_parallel_linear(
        normed, given["weight"], given.get("bias"), sequence_parallel=sequence_parallel
    )
    return [columns]


def _row_norm(given: dict[str, Tensor], eps: float, gather: bool = True, path: str = "auto") -> list[Tensor]:
    """What every rank holds whole is used with its own tokens, and the gradients of that are added up."""
    own = parallel.row_parallel_linear(given["x"], given["weight"], input_is_parallel=True, sequence_parallel=True)
    h = own + given["residual"]
    if "bias" in given:
        h = h + parallel.copy_to_tensor_parallel_region(given["bias"])
    weight = parallel.copy_to_tensor_parallel_region(given["norm_weight"])
    normed = F.rms_norm(h, weight.shape, weight, eps)
    if gather:
        normed = parallel.gather_from_sequence_parallel_region(normed, tensor_parallel_output_grad=False)
    return [normed, h]


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

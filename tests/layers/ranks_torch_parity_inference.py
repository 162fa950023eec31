"""What the ranks run when the layers of inference of the halves are compared: results as lists, and the texts of errors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.layers.ranks_torch_parity_layers import part
from tiled_torch import parallel

OF_TOKENS = ("x", "residual")  # operands whose dim 0 they are


def operands_of(
    rank: int, world: int, operands: dict[str, Any], dims: dict[str, int | None], sizes: list[int] | None
) -> dict[str, Tensor]:
    """This rank's parts of whole operands, weights as torch has them. sizes: tokens of every rank; None: equally many."""
    whole = {name: torch.tensor(a, dtype=torch.float64) for name, a in operands.items()}
    return {
        name: own(a, dims[name], rank, world, sizes if name in OF_TOKENS else None).clone() for name, a in whole.items()
    }


def own(whole: Tensor, dim: int | None, rank: int, world: int, sizes: list[int] | None) -> Tensor:
    """This rank's stretch along `dim`; of dim 0 it has `sizes[rank]`."""
    return part(whole, dim, rank, world) if dim != 0 or sizes is None else whole.split(sizes)[rank]


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
    """`dims` says along which dim each operand is split."""
    given = operands_of(rank, world, operands, dims, arguments.get("split_sizes"))
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
    sizes = arguments.get("split_sizes")
    given = {name: a.requires_grad_() for name, a in operands_of(rank, world, operands, dims, sizes).items()}
    composed = _norm_column if function == "norm_column_parallel_linear" else _row_norm
    results = composed(given, **arguments)
    upstream = [
        own(torch.tensor(d, dtype=torch.float64), dim, rank, world, sizes) for d, dim in zip(dy, outputs, strict=True)
    ]
    found = torch.autograd.grad(results, list(given.values()), upstream)
    return {name: a.tolist() for name, a in zip(given, found, strict=True)}


def _norm_column(
    given: dict[str, Tensor], eps: float, sequence_parallel: bool = False, split_sizes: list[int] | None = None
) -> list[Tensor]:
    """Where each rank normalises its own tokens, the gradients of the norm's weight are added up."""
    weight = given["norm_weight"]
    weight = parallel.copy_to_tensor_parallel_region(weight) if sequence_parallel else weight
    normed = F.rms_norm(given["x"], weight.shape, weight, eps)
    columns = parallel.column_parallel_linear(
        normed,
        given["weight"],
        given.get("bias"),
        sequence_parallel=sequence_parallel,
        split_sizes=split_sizes,
    )
    return [columns]


def _row_norm(
    given: dict[str, Tensor],
    eps: float,
    gather: bool = True,
    path: str = "auto",
    split_sizes: list[int] | None = None,
) -> list[Tensor]:
    """What every rank holds whole is used with its own tokens, and the gradients of that are added up."""
    total = parallel.row_parallel_linear(
        given["x"], given["weight"], input_is_parallel=True, sequence_parallel=True, split_sizes=split_sizes
    )
    h = total + given["residual"]
    if "bias" in given:
        h = h + parallel.copy_to_tensor_parallel_region(given["bias"])
    weight = parallel.copy_to_tensor_parallel_region(given["norm_weight"])
    normed = F.rms_norm(h, weight.shape, weight, eps)
    if gather:
        normed = parallel.gather_from_sequence_parallel_region(
            normed, split_sizes=split_sizes, tensor_parallel_output_grad=False
        )
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

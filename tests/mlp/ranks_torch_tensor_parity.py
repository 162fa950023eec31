"""What the ranks run for the comparison with JAX: whole operands in JAX's layouts come in, each rank's results go back."""

from typing import Any

import torch
from torch import Tensor

from shared_specs import LossOptions
from tiled_torch.parallel import tensor_parallel_mlp, vocab_parallel_linear_cross_entropy

Whole = dict[str, Any]


def _rows(a: Tensor, rank: int, sizes: list[int], split: bool) -> Tensor:
    first = sum(sizes[:rank])
    return a[first : first + sizes[rank]] if split else a


def _leaf(a: Tensor) -> Tensor:
    return a.contiguous().clone().requires_grad_()


def mlp(rank: int, world: int, given: Whole, sizes: list[int], sequence_parallel: bool, **options: Any) -> Whole:
    """y and every gradient of one rank, weights as [in, out]."""
    whole = {name: torch.tensor(a, dtype=torch.float64) for name, a in given.items()}
    local = {"x": _leaf(_rows(whole["x"], rank, sizes, sequence_parallel))}
    for name in ("w_gate", "w_up", "gate", "up"):
        local[name] = _leaf(whole[name].chunk(world, -1)[rank].T if name[0] == "w" else whole[name].chunk(world)[rank])
    local |= {"w_down": _leaf(whole["w_down"].chunk(world)[rank].T), "down": _leaf(whole["down"])}
    y = tensor_parallel_mlp(
        local["x"],
        local["w_gate"],
        local["w_up"],
        local["w_down"],
        biases={name: local[name] for name in ("gate", "up", "down")},
        sequence_parallel=sequence_parallel,
        split_sizes=sizes if sequence_parallel else None,
        **options,
    )
    y.backward(_rows(whole["dy"], rank, sizes, sequence_parallel))
    return {"y": y.tolist()} | {
        f"d{name}": (leaf.grad.T if name[0] == "w" else leaf.grad).tolist()  # type: ignore[union-attr]
        for name, leaf in local.items()
    }


def head(
    rank: int, world: int, given: Whole, targets: list[int], sizes: list[int], sequence_parallel: bool, **options: Any
) -> Whole:
    """The loss and every gradient of one rank, the weight as [in, out]; `dloss` is the upstream gradient."""
    tiling = {name: options.pop(name) for name in ("num_shards", "vocab_size")}
    whole = {name: torch.tensor(a, dtype=torch.float64) for name, a in given.items()}
    local = {
        "x": _leaf(_rows(whole["x"], rank, sizes, sequence_parallel)),
        "weight": _leaf(whole["weight"].chunk(world, -1)[rank].T),
        "bias": _leaf(whole["bias"].chunk(world)[rank]),
    }
    loss = vocab_parallel_linear_cross_entropy(
        local["x"],
        local["weight"],
        _rows(torch.tensor(targets), rank, sizes, sequence_parallel),
        bias=local["bias"],
        loss=LossOptions(**options),
        sequence_parallel=sequence_parallel,
        split_sizes=sizes if sequence_parallel else None,
        **tiling,
    )
    assert isinstance(loss, Tensor)
    loss.backward(_rows(whole["dloss"], rank, sizes, sequence_parallel) if loss.dim() else whole["dloss"])
    found = {"loss": loss.tolist()}
    return found | {
        f"d{name}": (leaf.grad.T if name == "weight" else leaf.grad).tolist()  # type: ignore[union-attr]
        for name, leaf in local.items()
    }

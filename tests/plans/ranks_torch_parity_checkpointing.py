"""What the ranks run when checkpointing policies of the halves are compared: a stack of sequence-parallel layers, gradients as
lists. See tests/ranks.py."""

from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.config import Checkpointing
from tests.layers.ranks_torch_parity_layers import part
from tiled_torch.parallel import (
    CheckpointWithoutOutput,
    Plan,
    apply_checkpointing,
    column_parallel_linear,
    row_parallel_linear,
)


class Layer(nn.Module):
    """x + down(tanh(up(x))): x and y are this rank's tokens, the weights its columns and its rows."""

    def __init__(self, up: Tensor, down: Tensor, without_output: bool) -> None:
        super().__init__()
        self.up, self.down, self.without_output = nn.Parameter(up), nn.Parameter(down), without_output
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        h = column_parallel_linear(x, self.up, sequence_parallel=True)
        call = CheckpointWithoutOutput() if self.without_output else None
        h = torch.tanh(h) if call is None else call.checkpoint(torch.tanh, h)
        y = row_parallel_linear(h, self.down, input_is_parallel=True, sequence_parallel=True)
        if call is not None:
            call.discard_output_and_register_recompute(y)
        return x + y


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stacks(
    rank: int, world: int, operands: dict[str, Any], cases: list[dict[str, Any] | None], without_output: list[bool]
) -> list[dict[str, Any]]:
    """y and all gradients of this rank's parts, and how often each layer ran, for every case.

    `operands` are whole: x and dy [T, H], and of every layer up [I, H] and down [H, I], as torch has them. `cases`: the
    fields of a `Checkpointing`, or None.
    """
    whole = {name: torch.tensor(value, dtype=torch.float64) for name, value in operands.items()}
    pairs = zip(cases, without_output, strict=True)
    return [_stack(rank, world, whole, fields, apart) for fields, apart in pairs]


def _stack(rank: int, world: int, whole: dict[str, Tensor], fields: Any, without_output: bool) -> dict[str, Any]:
    ups, downs = ([part(w, dim, rank, world).clone() for w in whole[name]] for name, dim in (("up", 0), ("down", 1)))
    model = Stack([Layer(up, down, without_output) for up, down in zip(ups, downs, strict=True)])
    if fields is not None:
        apply_checkpointing(model, Checkpointing(**fields), Plan(blocks="layers"))
    x, dy = (part(whole[name], 0, rank, world).clone() for name in ("x", "dy"))
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    layers: Any = model.layers
    found = {"y": y, "dx": x.grad} | {
        f"d{name}": torch.stack([getattr(layer, name).grad for layer in layers]) for name in ("up", "down")
    }
    return {name: a.tolist() for name, a in found.items()} | {"runs": [layer.runs for layer in layers]}

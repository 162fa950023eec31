"""An MLP that is small in weights and in tokens: tiled linear layers, one slice of the intermediate features at a time.

y = sum over slices of act(x w_gate_s^T) * (x w_up_s^T) w_down_s^T. A slice is a tile of gate, of up and of down; as a unit of
`fully_shard` at most two slices are gathered at once, and `tile` runs it shard by shard of the tokens:

    mlp = SlicedMLP(hidden_size, intermediate_size, slices=8, num_shards=16)
    for part in mlp.slices:
        fully_shard(part, mesh=mesh)

`tests/linear/test_torch_ranks_linear.py` compares it with one process and measures the bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tiled_torch import TiledLinear, tile


class Slice(nn.Module):
    """One run of the intermediate features."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class SlicedMLP(nn.Module):
    """A gated MLP without biases. Args: slices: of the weights; num_shards: of the tokens; options: device, dtype."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, slices: int, num_shards: int, **options: Any
    ) -> None:
        super().__init__()
        gate, up = (
            TiledLinear(hidden_size, intermediate_size, bias=False, out_splits=slices, **options) for _ in range(2)
        )
        down = TiledLinear(intermediate_size, hidden_size, bias=False, in_splits=slices, **options)
        columns, rows = zip(gate.linears, up.linears, strict=True), down.linears[0]
        self.slices = nn.ModuleList(Slice(g[0], u[0], d) for (g, u), d in zip(columns, rows, strict=True))
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]; the slices' results are added in float32 (float64 for float64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = (tile(part, num_shards=self.num_shards)(x) for part in self.slices)
        total = next(parts).to(wide, copy=True)
        for y in parts:
            total = total + y
        return total.to(x.dtype)

"""What the ranks run when sharded `TiledLinear`s of the halves are compared: FSDP2 around every tile. See tests/ranks.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.layers.ranks_torch_parity_layers import part
from tests.mlp.ranks_torch_engines import full
from tiled_torch import TiledLinear


def layers(rank: int, world: int, operands: dict[str, Any], cases: list[dict[str, int]]) -> list[dict[str, Any]]:
    """y and dx of this rank's tokens, and the whole gradients, summed over the ranks. `cases`: splits of the layer."""
    whole = {name: torch.tensor(value, dtype=torch.float64) for name, value in operands.items()}
    return [_layer(rank, world, whole, case) for case in cases]


def _layer(rank: int, world: int, whole: dict[str, Tensor], splits: dict[str, int]) -> dict[str, Any]:
    outputs, inputs = whole["weight"].shape
    linear = nn.Linear(inputs, outputs, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(whole["weight"])
        linear.bias.copy_(whole["bias"])
    layer, mesh = TiledLinear.from_linear(linear, **splits), init_device_mesh("cpu", (world,))
    for j, i, *_ in layer.grid():
        fully_shard(layer.linears[j][i], mesh=mesh)
    fully_shard(layer, mesh=mesh)
    x, dy = (part(whole[name], 0, rank, world).clone() for name in ("x", "dy"))
    y = layer(x.requires_grad_())
    y.backward(dy)
    dweight, dbias = torch.full_like(whole["weight"], torch.nan), torch.full_like(whole["bias"], torch.nan)
    for j, i, rows, columns in layer.grid():
        tile = layer.linears[j][i]
        dweight[rows, columns] = full(tile.weight.grad) * world  # FSDP divides by the ranks
        if tile.bias is not None:
            dbias[rows] = full(tile.bias.grad) * world
    found = {"y": y, "dx": x.grad, "dweight": dweight, "dbias": dbias}
    return {name: a.tolist() for name, a in found.items() if a is not None}

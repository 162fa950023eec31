"""The MLP in operations that carry the tangents of forward mode, a shard at a time; why: tiled_torch/loss/with_tangents.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.shards import ShardPlan
from tiled_torch.core.activation_functions import FUNCTIONS
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.tensors import rows_of, wide_dtype
from tiled_torch.mlp.steps import Weights


def mlp(x: Tensor, weights: Weights, dtype: torch.dtype, activation: str, plan: ShardPlan) -> Tensor:
    """y [..., H_out] and its tangent. x: [..., H]."""
    rows, wide, act = rows_of(x), wide_dtype(dtype), FUNCTIONS[activation]
    with without_autocast(x):
        w = weights.cast(dtype)
        parts = [rows.new_empty((0, w.w_down.shape[0]), dtype=dtype)] * (not len(plan))
        for start, stop in plan.spans:
            x_shard = rows[start:stop].to(dtype)
            up = F.linear(x_shard, w.w_up, w.b_up).to(wide)
            if w.w_gate is None:
                h = act(up)
            else:
                h = act(F.linear(x_shard, w.w_gate, w.b_gate).to(wide)) * up
            parts.append(F.linear(h.to(dtype), w.w_down, w.b_down))
        return torch.cat(parts).reshape(*x.shape[:-1], w.w_down.shape[0])

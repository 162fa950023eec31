"""A model of one's own for `parallelize`: gated linear attention, a state instead of a softmax, and its plan.

The styles of `tiled_torch.plans.tensor_styles` say how each layer is split; PyTorch's own ones fit where they exist.
`tests/plans/test_torch_ranks_plans.py` compares this model under every configuration with one process.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shared_specs.config import TensorParallel
from shared_specs.plans.checks import TensorSizes, check_divides
from tiled_torch import TiledLinearCrossEntropy, TiledMLP
from tiled_torch.parallel import Plan, register_plan
from tiled_torch.plans.tensor_styles import Embedding, Norm, TiledLossStyle, TiledMLPStyle, Whole

HIDDEN, HEADS, VOCAB = 16, 4, 37


class Attention(nn.Module):
    """o_t = q_t S_t with S_t = diag(a_t) S_{t-1} + k_t v_t^T, for each head."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "a", "o"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, HIDDEN // HEADS)
        q, k, v, a = (getattr(self, name)(x).view(shape) for name in ("q", "k", "v", "a"))
        decay, state, outputs = torch.sigmoid(a + 2), 0.0, []
        for t in range(q.shape[1]):
            state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return self.o(torch.stack(outputs, 1).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(HIDDEN), TiledMLP(HIDDEN, 24, num_shards=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GatedLinearModel(nn.Module):
    """Returns the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = TiledLinearCrossEntropy(HIDDEN, VOCAB, num_shards=2)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), targets)


def _check(_: Any, tensor: TensorParallel, ranks: int) -> None:
    check_divides("parallelize", TensorSizes(even={"heads": HEADS}, vocab=VOCAB), tensor.axis, ranks)


def _styles(_: Any, tensor: TensorParallel) -> dict[str, ParallelStyle]:
    stream: Placement = Shard(1) if tensor.sequence_parallel else Replicate()
    return {
        "embedding": Embedding(stream),
        "blocks.*.attention_norm": Norm(stream),
        "blocks.*.attention": Whole(),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v", "a")},
        "blocks.*.attention.o": RowwiseParallel(output_layouts=stream, use_local_output=False),
        "blocks.*.mlp_norm": Norm(stream),
        "blocks.*.mlp": TiledMLPStyle(sequence_parallel=tensor.sequence_parallel),
        "norm": Norm(stream),
        "head": TiledLossStyle(),
    }


# From here on parallelize(GatedLinearModel(), mesh, config) knows what to do.
register_plan(
    GatedLinearModel,
    Plan(blocks="blocks", ends=("embedding", "norm", "head"), check=_check, styles=_styles),
    replace=True,
)

"""What the ranks run under DeepSpeed's engine for the drop-in names. See tests/ranks.py and ranks_zero.py."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.plans.ranks_torch_plans import error_between
from tests.zero.ranks_zero import SHARDS, Gathers, engine_of, engines, gradients, settings
from tiled_torch.compat.deepspeed import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from tiled_torch.compat.liger import LigerTiledSwiGLUMLP, apply_tiled_mlp

H, V = 8, 11


class Block(nn.Module):
    """An MLP whose forward goes through one of the drop-in names, or through none."""

    def __init__(self, name: str, shards: int) -> None:
        super().__init__()
        self.up, self.down, self.name, self.shards = nn.Linear(H, 12), nn.Linear(12, H), name, shards

    def plain(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        named = [*self.up.parameters(), *self.down.parameters()]
        if self.name == "apply":
            return apply_tiled_mlp(Block.plain, self, x, self.shards)
        if self.name == "mlp":
            return TiledMLP.apply(Block.plain, self, x, self.shards, named)
        if self.name == "sequence":
            options: dict[str, Any] = {"output_unshard_dimension": 1, "output_reduction": None}
            cut, passed = {"x": x}, {"block": self}
            return sequence_tiled_compute(_of_block, x.shape[1], self.shards, cut, passed, "x", named, **options)
        return self.plain(x)


def _of_block(x: Tensor, block: Block) -> Tensor:
    return block.plain(x)


class Model(nn.Module):
    """A block of each name, Liger's module and DeepSpeed's loss; the first one's input needs no gradient."""

    def __init__(self, tiled: bool, shards: int, checkpoint: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("apply", "mlp", "sequence") if tiled else ("plain",) * 3
        self.blocks = nn.ModuleList(Block(name, shards) for name in names)
        config = SimpleNamespace(hidden_size=H, intermediate_size=12, hidden_act="silu")
        self.liger, self.head = LigerTiledSwiGLUMLP(config, shards), nn.Linear(H, V, bias=False)
        self.tiled, self.shards, self.checkpoint = tiled, shards, checkpoint

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in (*self.blocks, self.liger):
            call = block if self.tiled or block is not self.liger else self._plain_liger
            if self.checkpoint and x.requires_grad:
                x = torch_checkpoint(call, x, use_reentrant=self.checkpoint == "reentrant")  # type: ignore[assignment]
            else:
                x = call(x)
        if not self.tiled:
            return self.loss(x.flatten(0, 1), y.flatten())
        return TiledFusedLogitsLoss.apply(Model.loss, self, x, y, None, self.shards, [self.head.weight], "sum")

    def _plain_liger(self, x: Tensor) -> Tensor:
        mlp = self.liger
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y, reduction="sum")


def drop_in(rank: int, world: int, stage: int, checkpoint: str = "") -> dict[str, Any]:
    """Two steps, with an evaluation between them, of the same model untiled and by the drop-in names.

    The shards are not as many on each rank.
    """
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 7, H, generator=generator), torch.randint(V, (4, 7), generator=generator)
    x, y = x[rank::world], y[rank::world]
    answers = []
    with engines():
        for tiled in (False, True):
            model = Model(tiled, SHARDS + rank, checkpoint)
            engine = engine_of(model, settings(stage))
            found, gathers = [], []
            for _ in range(2):
                with Gathers(model) as counted:
                    loss = engine(x, y)
                    held = counted.outlived()
                    engine.backward(loss)
                    found.append((loss.item(), gradients(model)))
                    engine.step()
                gathers.append(dict(counted.counts))
                engine.eval()
                with torch.no_grad():
                    evaluated = engine(x, y).item()
                engine.train()
                found.append((evaluated, {}))
            hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
            whole = sum(p.numel() for p in model.parameters()) if stage == 3 else 0
            answers.append((found, gathers, held, hooks, whole))
    plain, ours = answers
    pairs = list(zip(ours[0], plain[0], strict=True))
    return {
        "loss": max(abs(a - b) / abs(b) for (a, _), (b, _) in pairs),
        "error": max(error_between(a, b) for (_, a), (_, b) in pairs if b),
        "gathers": list(zip(plain[1], ours[1], strict=True)),
        "outlived": ours[2],
        "hooks": ours[3] == plain[3],
        "whole": ours[4],
    }

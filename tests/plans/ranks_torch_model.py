"""The model of the multi-rank tests and its truth: untiled, in one process, over all ranks' data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiled_torch import TiledMLP, tile, tiled_mlp

HIDDEN, INTERMEDIATE = 8, 12
MICRO_BATCHES = 2


class GatedMLP(nn.Module):
    """Untiled: three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def apart(self, x: Tensor) -> Tensor:
        """A method that is not forward."""
        return self.forward(x)


class TiledWeights(GatedMLP):
    """The same parameters through `tiled_mlp`."""

    def __init__(self, num_shards: int, keep: float = 0.0) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"num_shards": num_shards, "keep": keep}

    def forward(self, x: Tensor) -> Tensor:
        return tiled_mlp(x, self.gate.weight, self.up.weight, self.down.weight, **self.options)


class TiledModule(nn.Module):
    """A module through `tile` anew in every call."""

    def __init__(self, num_shards: int, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return tile(self.inner, num_shards=self.num_shards)(x)


class TiledForward(GatedMLP):
    """The same module with its forward method tiled in place."""

    def __init__(self, num_shards: int) -> None:
        super().__init__()
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return tile(super().forward, num_shards=self.num_shards)(x)


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank one."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LoRAMLP(GatedMLP):
    def __init__(self) -> None:
        super().__init__()
        for name in ("gate", "up", "down"):
            setattr(self, name, LoRALinear(getattr(self, name)))


MLPS: dict[str, Callable[[int], nn.Module]] = {
    "untiled": lambda num_shards: GatedMLP(),
    "TiledMLP": lambda num_shards: TiledMLP(HIDDEN, INTERMEDIATE, num_shards=num_shards),
    "tiled_mlp": TiledWeights,
    "tiled_mlp-keep": lambda num_shards: TiledWeights(num_shards, keep=0.5),
    "tile": lambda num_shards: tile(GatedMLP(), num_shards=num_shards),
    "tile-forward": TiledForward,
    "untiled-lora": lambda num_shards: LoRAMLP(),
    "tile-lora": lambda num_shards: TiledModule(num_shards, LoRAMLP()),
}


class Block(nn.Module):
    """x + mlp(linear(x)); replayed in backward where `checkpointed`."""

    def __init__(self, mlp: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.mlp, self.checkpointed = nn.Linear(HIDDEN, HIDDEN), mlp, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[return-value]
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.linear(x))


class Model(nn.Module):
    """Two blocks in float64, the same values for every kind of MLP."""

    def __init__(self, kind: str, num_shards: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(MLPS[kind](num_shards), checkpointed) for _ in range(2))
        self.double()
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shards_of(rank: int) -> int:
    """Ranks cut their tokens into different numbers of shards."""
    return 2 + 3 * rank


def batch(rank: int, micro: int, case: str = "plain") -> Tensor:
    """[2, S, H]; S differs from rank to rank and from micro-batch to micro-batch, and may be 0 on the last rank."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    length = 0 if case == "no_tokens" and rank > 0 else 5 + 4 * rank + 2 * micro
    return torch.randn(2, length, HIDDEN, generator=generator, dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    """A fixed linspace weighting, so that no gradient is symmetric."""
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def untiled(kind: str) -> Model:
    """The model that a kind is compared with."""
    return Model("untiled-lora" if kind.endswith("lora") else "untiled")


def freeze_input(model: Model) -> None:
    """Nothing that the first MLP receives needs a gradient."""
    model.blocks[0].linear.requires_grad_(False)  # type: ignore[union-attr]


def expected_gradients(
    kind: str, world: int, micro_batches: int = MICRO_BATCHES, case: str = "plain"
) -> dict[int, Tensor]:
    """By position among the parameters: mean over ranks of the sum over micro-batches, untiled in one process."""
    model = untiled(kind)
    if case == "frozen_input":
        freeze_input(model)
    for rank in range(world):
        for micro in range(micro_batches):
            (loss_of(model(batch(rank, micro, case))) / world).backward()
    return {i: p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}


def error_between(found: dict[int, Tensor | None], expected: dict[int, Tensor]) -> float:
    """The largest relative L2 distance; infinite where a gradient is missing, added or not finite."""
    present = {i: grad for i, grad in found.items() if grad is not None}
    if set(present) != set(expected) or not all(bool(g.isfinite().all()) for g in present.values()):
        return float("inf")
    return max(float((present[i] - grad).norm() / grad.norm()) for i, grad in expected.items())

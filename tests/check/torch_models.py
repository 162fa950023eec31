"""A language model of a few hundred weights whose every part can be made wrong, for `check`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, I, V, T = 8, 12, 17, 16  # noqa: E741


class Attention(nn.Module):
    """One head; tokens see those before them, of their own document and not of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H, bias=False)
        self.windows = 1  # parts of the sequence that see themselves alone

    def forward(self, x: Tensor, document: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        seen = (place[:, None] >= place[None]).expand(x.shape[0], -1, -1)
        if document is not None:
            seen = seen & (document[:, :, None] == document[:, None])
        if padding is not None:
            seen = seen & (padding[:, None] | torch.eye(x.shape[1], dtype=torch.bool))
        if self.windows > 1:
            part = place // (x.shape[1] // self.windows)
            seen = seen & (part[:, None] == part[None])
        scores = (q @ k.mT * H**-0.5).masked_fill(~seen, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, I), nn.Linear(H, I)
        self.down = nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoRA(nn.Module):
    """A linear layer with an adapter, which starts as one that does something."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class MoE(nn.Module):
    """Every expert of three, weighed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 3, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x, self.router(x))

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights[..., None, :]).sum(-1)


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(H), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(H), mlp

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **where)
        return x + self.mlp(self.mlp_norm(x))


class TinyLM(nn.Module):
    """Returns its loss alone. moe: of its MLPs. tied: its head is its embedding. cap: of its logits. drop: after its layers."""

    def __init__(self, moe: bool = False, tied: bool = False, cap: float = 0.0, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer(MoE() if moe else MLP()) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, V, bias=False)
        self.cap, self.drop = cap, nn.Dropout(drop)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, ids: Tensor, labels: Tensor, document: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, document=document, padding=padding)
        return self.loss(self.drop(self.norm(x)), labels)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def tiny(seed: int = 0, **options: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**options)


def tokens(batch: int = 2, **more: Tensor) -> dict[str, Tensor]:
    """A batch; more: its labels, documents, padding."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (batch, T), generator=random)
    return {"ids": ids, "labels": ids} | more

"""Modules for `verify`, in both frameworks."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn


@dataclass
class SimpleResult:
    logits: Any
    loss: Any


class TorchMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class TorchNormed(nn.Module):
    """Token-wise, and no MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(x))


class TorchMixing(nn.Module):
    """Looks at all tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x - x.mean(1, keepdim=True))


class TorchSecond(nn.Module):
    """Of two results the second looks at all tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"first": self.norm(x), "best": x.argmax(-1), "more": [self.norm(x - x.mean(1, keepdim=True))]}


class TorchTraining(nn.Module):
    """Looks at all tokens in training alone."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x - x.mean(1, keepdim=True) if self.training else x)


class TorchDropped(nn.Module):
    """Draws twice: for all tokens the one, then for all the other, where a shard draws both before the next one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.mix(F.dropout(x, 0.5, self.training)), 0.5, self.training)


class TorchOnce(TorchDropped):
    """Draws beside its MLP: the same numbers, tiled or not."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.mlp = TorchMLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(F.dropout(self.mlp(x), 0.5, self.training))


class TorchSpare(TorchNormed):
    """Has a parameter that takes no part."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.spare = nn.Linear(hidden, hidden, bias=False)


class TorchLM(nn.Module):
    """A language model, which makes its loss where labels are given."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(19, hidden), TorchMLP(hidden), nn.Linear(hidden, 19)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleResult:
        logits = self.head(self.mlp(self.embed(input_ids)))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleResult(logits=logits, loss=loss)


class TorchWordless(TorchLM):
    """A language model without a vocabulary to draw from."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class JaxMLP(nnx.Module):
    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(hidden, 2 * hidden, rngs=rngs), nnx.Linear(2 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


class JaxMixing(nnx.Module):
    """Looks at all tokens."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x - x.mean(1, keepdims=True))


class JaxGated(nnx.Module):
    """A gated MLP, whose products are in a dtype that is named."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.gate, self.up = (nnx.Linear(hidden, 12, dtype=jnp.float32, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(12, hidden, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x)) * scale


class JaxLayer(nnx.Module):
    """Looks at all tokens, and has three MLPs: one is called with more than x, and one (of tanh) is another formula."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.mix, self.other = JaxMixing(hidden, rngs=rngs), JaxMLP(hidden, rngs=rngs)
        self.first, self.last = JaxGated(hidden, rngs=rngs), JaxGated(hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.mix(x)
        return self.last(x + self.first(x), 0.5) + self.other(x)


class JaxSecond(JaxMLP):
    """Of two results the second looks at all tokens."""

    def __call__(self, x: jax.Array) -> object:
        return {"first": x * 2, "best": jnp.argmax(x, -1), "more": [jnp.tanh(self.up(x - x.mean(1, keepdims=True)))]}


class JaxTraining(JaxMixing):
    """Looks at all tokens in training alone."""

    deterministic = True

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x if self.deterministic else x - x.mean(1, keepdims=True))


class JaxDropped(JaxMixing):
    """Draws for each token."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(hidden, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.up(x))


class JaxOnce(JaxDropped):
    """Draws beside its MLP: the same numbers, tiled or not."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(hidden, rngs=rngs)
        self.mlp = JaxGated(hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(self.mlp(x))


class JaxLM(nnx.Module):
    """A language model, which makes its loss where labels are given."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed, self.mlp = nnx.Embed(19, 8, rngs=rngs), JaxGated(8, rngs=rngs)

    def __call__(self, input_ids: jax.Array, labels: jax.Array | None = None) -> SimpleResult:
        logits = self.embed.attend(self.mlp(self.embed(input_ids)))
        loss = None
        if labels is not None:
            log_p = jax.nn.log_softmax(logits)[:, :-1]
            loss = -jnp.mean(jnp.take_along_axis(log_p, labels[:, 1:, None], axis=-1))
        return SimpleResult(logits=logits, loss=loss)


def of_two(first: int, second: int) -> None: ...


def failing() -> None:
    raise ValueError("no module today")


MADE = TorchMLP(8)
NUMBER = 3

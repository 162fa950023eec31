"""Modules for `verify`, in both frameworks."""

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import nn


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


def of_two(first: int, second: int) -> None: ...


def failing() -> None:
    raise ValueError("no module today")


MADE = TorchMLP(8)
NUMBER = 3

"""A Flax language model of a few hundred weights whose every part can be made wrong, for `check`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

H, I, V, T = 8, 12, 17, 16  # noqa: E741


class Attention(nnx.Module):
    """One head; tokens see those before them, of their own document and not of padding."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.qkv, self.out = nnx.Linear(H, 3 * H, rngs=rngs, **options), nnx.Linear(H, H, rngs=rngs, **options)
        self.windows = 1  # parts of the sequence that see themselves alone

    def __call__(self, x: jax.Array, document: Any = None, padding: Any = None) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        place = jnp.arange(x.shape[1])
        seen = jnp.broadcast_to(place[:, None] >= place[None], (x.shape[0], x.shape[1], x.shape[1]))
        if document is not None:
            seen &= document[:, :, None] == document[:, None]
        if padding is not None:
            seen &= padding[:, None] | jnp.eye(x.shape[1], dtype=bool)
        if self.windows > 1:
            part = place // (x.shape[1] // self.windows)
            seen &= part[:, None] == part[None]
        scores = jnp.where(seen, q @ k.mT * H**-0.5, -jnp.inf)
        return self.out(jax.nn.softmax(scores) @ v)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.gate, self.up, self.down = (nnx.Linear(a, b, rngs=rngs, **options) for a, b in ((H, I), (H, I), (I, H)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class MoE(nnx.Module):
    """Two experts, weighed by a router."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.router = nnx.Linear(H, 2, use_bias=False, rngs=rngs, **options)
        self.one, self.other = MLP(rngs, **options), MLP(rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mixed(x, self.router(x))

    def mixed(self, x: jax.Array, logits: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(logits)
        return self.one(x) * weights[..., :1] + self.other(x) * weights[..., 1:]


class TinyLM(nnx.Module):
    """Returns its loss alone. moe: of its MLP. tied: its head is its embedding. drop: after its MLP."""

    def __init__(self, moe: bool = False, tied: bool = False, drop: float = 0.0, seed: int = 0, **options: Any) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(V, H, rngs=rngs, **options)
        self.norm, self.attention = nnx.RMSNorm(H, rngs=rngs, **options), Attention(rngs, **options)
        self.mlp = (MoE if moe else MLP)(rngs, **options)
        self.head = None if tied else nnx.Linear(H, V, use_bias=False, rngs=rngs, **options)
        self.drop = nnx.Dropout(drop, rngs=rngs) if drop else None

    def __call__(self, ids: Any, labels: Any, document: Any = None, padding: Any = None) -> jax.Array:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), document, padding)
        x = x + self.mlp(x)
        return self.loss(x if self.drop is None else self.drop(x), labels)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(x) if self.head is None else self.head(x)

    def loss(self, x: jax.Array, labels: Any) -> jax.Array:
        return cross_entropy(self.logits(x), labels)


def cross_entropy(logits: jax.Array, labels: Any, counted: bool = False) -> jax.Array:
    """Return the mean over labels that are not -100; counted: divided by all of them."""
    labels = labels[:, 1:]
    log_p = jax.nn.log_softmax(logits[:, :-1])
    found = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    number = labels.size if counted else jnp.sum(labels >= 0).astype(logits.dtype)
    return -jnp.where(labels >= 0, found, 0).sum() / number


class LinenMLP(linen.Module):
    """A model of linen, whose loss is the mean square of an MLP."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = linen.silu(linen.Dense(I, name="gate")(x)) * linen.Dense(I, name="up")(x)
        return jnp.mean(linen.Dense(H, name="down")(h) ** 2)


def tokens(batch: int = 2, **more: Any) -> dict[str, Any]:
    """A batch; more: its labels, documents, padding."""
    ids = jnp.asarray(np.random.default_rng(1).integers(V, size=(batch, T)), jnp.int32)
    return {"ids": ids, "labels": ids} | more


def states() -> jax.Array:
    """Hidden states."""
    return jnp.asarray(np.random.default_rng(2).standard_normal((2, T, H)), jnp.float32)

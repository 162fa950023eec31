"""One layer of the decoder: norms, attention, and an MLP or experts, as a configuration describes them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import Tiling
from tiled_jax.core.products import wide
from tiled_jax.layers.attention import causal_attention, precision_of
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.models.mlp import PlainMLP
from tiled_jax.models.rope import rotate

Angles = tuple[jax.Array, jax.Array]


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x: [batch * tokens, hidden_size] float32.

    With `branch_norms` what attention and the MLP return is normalised before it is added.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        mlp: nnx.Module,
        dtype: jnp.dtype,
        param_dtype: Any = None,
        attention: str = "auto",
        rngs: nnx.Rngs,
    ):
        norm = partial(norm_of, config, config.hidden_size, dtype, rngs)
        self.attention_norm = norm()
        self.attention = Attention(config, dtype=dtype, param_dtype=param_dtype, backend=attention, rngs=rngs)
        self.attention_out_norm = norm() if config.branch_norms else None
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_out_norm = norm() if config.branch_norms else None

    def __call__(
        self,
        x: jax.Array,
        angles: Angles,
        documents: jax.Array | None = None,
        mask: jax.Array | None = None,
        kind: jax.Array | None = None,
    ) -> jax.Array:
        """documents, mask, kind: as `Attention` takes them."""
        # Without the checkpoints each norm would keep four arrays like x for backward; this way x is the only one.
        y = self.attention(jax.checkpoint(self.attention_norm)(x), angles, documents, mask, kind)
        return self.behind(x, y)

    def behind(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the layer's result; x: what it began with, y: what attention returned."""
        x = with_branch(x, y, self.attention_out_norm)
        return with_branch(x, self.mlp(jax.checkpoint(self.mlp_norm)(x)), self.mlp_out_norm)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key and value heads."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jnp.dtype, param_dtype: Any = None, backend: str = "auto", rngs: nnx.Rngs
    ):
        self.config, self.head_dim, self.backend = config, config.head_dim, backend
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        linear = partial(linear_of, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.fused:
            self.qkv = linear(config.hidden_size, queries + 2 * keys, config.attention_bias)
        else:
            self.q = linear(config.hidden_size, queries, config.attention_bias)
            self.k = linear(config.hidden_size, keys, config.attention_bias)
            self.v = linear(config.hidden_size, keys, config.attention_bias)
        norm = partial(norm_of, config, self.head_dim, dtype, rngs)
        self.q_norm, self.k_norm = (norm(), norm()) if config.head_norms else (None, None)
        self.o = linear(queries, config.hidden_size, config.attention_out_bias)

    def __call__(
        self,
        x: jax.Array,
        angles: Angles,
        documents: jax.Array | None = None,
        mask: jax.Array | None = None,
        kind: jax.Array | None = None,
    ) -> jax.Array:
        """[batch * tokens, hidden_size] -> the same; `angles` tell how many tokens a sequence has.

        documents, mask: [batch or 1, tokens], as `causal_attention` takes them. kind: a number, which of `config.kinds` the
        layer is of; None: there is one.
        """

        # Keeps q, k and v alone: not their turned copies, nor the keys of each run of query blocks.
        @jax.checkpoint
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return self.attend(*self.turned(q, k, angles), v, documents, mask, kind)

        y = attend(*self.heads(x, angles[0].shape[-2]))
        return self.o(y.reshape(x.shape[0], -1))

    def heads(self, x: jax.Array, tokens: int) -> list[jax.Array]:
        """Return q, k and v [batch, tokens, heads, head_dim] as their projections make them."""
        if self.config.fused:
            keys = self.config.num_key_value_heads * self.head_dim
            y = self.qkv(x)
            parts = jnp.split(y, (y.shape[-1] - 2 * keys, y.shape[-1] - keys), axis=-1)
        else:
            parts = [self.q(x), self.k(x), self.v(x)]
        return [a.reshape(-1, tokens, a.shape[-1] // self.head_dim, self.head_dim) for a in parts]

    def turned(self, q: jax.Array, k: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Return q and k as they meet in scores: normalised, where this model does, and turned by their positions."""
        q, k = self.normed(q, k)
        return rotate(q, *angles), rotate(k, *angles)

    def normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return q and k, each head normalised by itself where this model does."""
        if self.q_norm is not None and self.k_norm is not None:
            pairs = (self.q_norm, q), (self.k_norm, k)
            q, k = (norm(a.astype(wide(a.dtype))).astype(a.dtype) for norm, a in pairs)
        return q, k

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        documents: jax.Array | None,
        mask: jax.Array | None,
        kind: jax.Array | None,
    ) -> jax.Array:
        """Return attention of turned q and k, through the window of the layer's kind."""
        options: dict[str, Any] = {"scale": self.config.attention_scale, "softcap": self.config.attention_softcap}
        options |= {"documents": documents, "mask": mask, "backend": self.backend}
        windows = self.config.windows(q.shape[1])
        if len(set(windows)) == 1 or kind is None:
            return causal_attention(q, k, v, window=windows[0], **options)
        # Each window is a program of its own, which multiplies no keys outside of it.
        each = tuple(dict.fromkeys(windows))
        branches = [partial(lambda window, *qkv: causal_attention(*qkv, window=window, **options), w) for w in each]
        return lax.switch(jnp.asarray([each.index(w) for w in windows])[kind], branches, q, k, v)


class OffsetRMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) of the last dim, in float32 (float64 for float64); scale begins at 1 - offset.

    Source: Zhang and Sennrich 2019; the offset is that of Gemma (arXiv 2403.08295), whose scales decay towards 1.
    """

    def __init__(self, features: int, *, offset: float, epsilon: float, param_dtype: Any = jnp.float32):
        self.offset, self.epsilon = offset, epsilon
        self.scale = nnx.Param(jnp.full(features, 1.0 - offset, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same, in the wide dtype."""
        x, scale = x.astype(wide(x.dtype)), self.scale[...]
        size = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * size * (self.offset + scale.astype(x.dtype))


def norm_of(config: LlamaConfig, features: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> Any:
    """Return a norm of the model, a module."""
    if config.norm_offset:
        return OffsetRMSNorm(features, offset=config.norm_offset, epsilon=config.rms_norm_eps, param_dtype=wide(dtype))
    return nnx.RMSNorm(features, epsilon=config.rms_norm_eps, param_dtype=wide(dtype), rngs=rngs)


def linear_of(
    inputs: int, outputs: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, param_dtype: Any = None
) -> nnx.Linear:
    """Return a linear layer with products in `dtype`, and parameters in `param_dtype` or float32 (float64 for float64)."""
    params = param_dtype or wide(dtype)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": params, "precision": precision_of(dtype)}
    return nnx.Linear(inputs, outputs, use_bias=bias, **options, rngs=rngs)


def mlp_of(
    config: LlamaConfig,
    tiling: Tiling | None,
    plain: bool,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    param_dtype: Any = None,
) -> nnx.Module:
    """Return the MLP of a layer, or its experts."""
    sizes = config.hidden_size, config.intermediate_size
    shared: dict[str, Any] = {"activation": config.activation, "dtype": dtype, "rngs": rngs}
    shared["param_dtype"] = param_dtype or wide(dtype)
    if config.experts is not None:
        return ExpertsMLP(*sizes, experts=config.experts, tiling=tiling, plain=plain, **shared)
    shared |= {"bias": config.mlp_bias, "fused_gate_up": config.fused}
    return PlainMLP(*sizes, **shared) if plain else TiledMLP(*sizes, tiling=tiling, **shared)


def with_branch(x: jax.Array, y: jax.Array, norm: Any) -> jax.Array:
    """Return x and what a branch of the layer returned, y, behind the norm that may follow it."""
    return x + (y if norm is None else jax.checkpoint(norm)(y)).astype(x.dtype)
